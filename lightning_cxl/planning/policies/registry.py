"""Policies by name: the built-in ones, and anybody's by import path."""

import importlib
from collections.abc import Mapping

from lightning_cxl.errors import ConfigError
from lightning_cxl.placement.policy import PlacementPolicy
from lightning_cxl.planning.policies.api import PlanningPolicy
from lightning_cxl.planning.policies.bandwidth import Bandwidth
from lightning_cxl.planning.policies.baselines import DramOnly, Interleave
from lightning_cxl.planning.policies.latency_first import LatencyFirst

POLICIES: Mapping[str, type[PlanningPolicy]] = {
    "dram_only": DramOnly,
    "interleave": Interleave,
    "latency_first": LatencyFirst,
    "bandwidth": Bandwidth,
}
"""Those that plan a whole job, by name."""

_NEEDS = "has no method `decide` (plans a job, see PlanningPolicy) or `place` (tensor by tensor, see PlacementPolicy)"


def get_policy(name: str) -> PlanningPolicy | PlacementPolicy:
    """Return a new policy: a built-in one, or the class at an import path such as ``"my_package.module.MyPolicy"``.

    Raises:
        ConfigError: there is none of that name, it cannot be imported, or it is no policy.
    """
    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.rpartition(".")
    known = ", ".join(map(repr, POLICIES))
    if not module:
        raise ConfigError(f"there is no policy {name!r}; choose one of {known}, or the import path of a class")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"policy {name!r} cannot be imported ({error}); choose one of {known}, or write package.module.Class"
        ) from error
    if not isinstance(kind, type) or not _is_policy(kind):
        raise ConfigError(f"policy {name!r} is no class, or {_NEEDS}")
    try:
        policy: PlanningPolicy | PlacementPolicy = kind()
    except TypeError as error:
        raise ConfigError(f"policy {name!r} cannot be constructed without arguments: {error}") from error
    return policy


def plans(policy: object) -> bool:
    """Whether a policy decides about a whole job at once."""
    return callable(getattr(policy, "decide", None))


def check_policy(policy: object) -> None:
    """Refuse a name or an object that is no policy.

    Raises:
        ConfigError: not a policy; the message says which there are.
    """
    if isinstance(policy, str):
        if policy not in ("auto", "by_role"):
            get_policy(policy)
    elif not _is_policy(policy):
        raise ConfigError(
            f"policy={policy!r} {_NEEDS}; nor is it a name: 'auto', 'by_role', {', '.join(map(repr, POLICIES))}"
        )


def _is_policy(policy: object) -> bool:
    return plans(policy) or callable(getattr(policy, "place", None))
