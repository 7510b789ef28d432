"""Policies by name: the built-in ones, and anybody's by import path."""

import importlib
from collections.abc import Mapping

from lightning_cxl.errors import ConfigError
from lightning_cxl.policies.api import PlanningPolicy
from lightning_cxl.policies.bandwidth import Bandwidth
from lightning_cxl.policies.baselines import DramOnly, Interleave
from lightning_cxl.policies.latency_first import LatencyFirst
from lightning_cxl.tiers.policy import PlacementPolicy

POLICIES: Mapping[str, type[PlanningPolicy]] = {
    "dram_only": DramOnly,
    "interleave": Interleave,
    "latency_first": LatencyFirst,
    "bandwidth": Bandwidth,
}
"""Those that plan a whole job, by name."""


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
    if not (
        isinstance(kind, type) and (callable(getattr(kind, "decide", None)) or callable(getattr(kind, "place", 0)))
    ):
        raise ConfigError(
            f"policy {name!r} is no class with a method `decide` (plans a job, see PlanningPolicy) or `place` "
            f"(tensor by tensor, see PlacementPolicy)"
        )
    try:
        policy: PlanningPolicy | PlacementPolicy = kind()
    except TypeError as error:
        raise ConfigError(f"policy {name!r} cannot be constructed without arguments: {error}") from error
    return policy


def plans(policy: object) -> bool:
    """Whether a policy decides about a whole job at once."""
    return callable(getattr(policy, "decide", None))


def check_policy(name: str) -> None:
    """Refuse a name that is no policy.

    Raises:
        ConfigError: as `get_policy`.
    """
    if name != "auto":
        get_policy(name)
