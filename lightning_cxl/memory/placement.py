"""The role of a tensor (`TensorRole`), the tiers that decorators and rules ask for, and its `Placement`."""

import contextvars
import difflib
import enum
import fnmatch
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TypeVar

from lightning_cxl.config import SSD
from lightning_cxl.errors import ConfigError, TierNotFoundError, UnsupportedError
from lightning_cxl.machine.topology import TierKind, Topology
from lightning_cxl.text import format_bytes


class TensorRole(enum.Enum):
    """The purpose of a host tensor; the memory classes of arXiv 2507.03305, section on allocation."""

    COMPUTE_WEIGHTS = "compute_weights"
    COMPUTE_GRADS = "compute_grads"
    MASTER_WEIGHTS = "master_weights"
    MASTER_GRADS = "master_grads"
    MOMENTUM = "momentum"
    VARIANCE = "variance"
    ACTIVATIONS = "activations"
    STAGING = "staging"

    @property
    def is_copied(self) -> bool:
        """Whether a device with memory of its own copies it; masters and moments are for the CPU alone."""
        return self not in (TensorRole.MASTER_WEIGHTS, TensorRole.MOMENTUM, TensorRole.VARIANCE)


@dataclass(frozen=True, slots=True)
class Placement:
    """The tiers that one tensor may use, in order of preference."""

    tiers: tuple[str, ...]  # tier names, first choice first; the others are where it may spill
    pinned: bool = False  # page-locked and registered with the device's driver
    reason: str = ""  # why, in a few words: shown by the report
    shares: tuple[float, ...] = ()
    """Fraction of the bytes on each of `tiers`, in stripes; the tensor may spill to those with 0. Empty:
    everything goes to the first."""

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ValueError("a Placement must name at least one tier")
        shares = self.shares or (1.0,) + (0.0,) * (len(self.tiers) - 1)
        fits = len(shares) == len(self.tiers) and min(shares) >= 0
        if not fits or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise ValueError(f"shares must be a fraction per tier, 1 together, got {shares} for {self.tiers}")

    def split(self) -> dict[str, float]:
        if not self.shares:
            return {self.tiers[0]: 1.0}
        return {tier: share for tier, share in zip(self.tiers, self.shares, strict=True) if share > 0}

    def split_bytes(self, nbytes: int) -> dict[str, int]:
        """Return what each tier gets of a tensor, whole bytes that add up to `nbytes`."""
        sizes: dict[str, int] = {}
        before, share_before = 0, 0.0
        for tier, share in self.split().items():
            share_before += share
            end = min(nbytes, round(nbytes * share_before))
            sizes[tier], before = end - before, end
        sizes[tier] += nbytes - before  # shares may add up to a millionth less than 1
        return sizes

    def describe(self) -> str:
        split = self.split()
        parts = [f"{tier} {share:.0%}".replace("%", " %") for tier, share in split.items()]
        text = ", ".join(parts) if len(split) > 1 else next(iter(split))
        text += "".join(f", else {tier}" for tier in self.tiers if tier not in split)
        text += ", pinned" if self.pinned else ""
        return f"{text} ({self.reason})" if self.reason else text


# The CPU streams optimizer state every step. A GPU's writes into CXL lose 33 % and its reads 4 % (arXiv 2507.03305);
# activations move once each way.
def preferred_kinds(role: TensorRole, *, cpu_computes: bool) -> tuple[TierKind, ...]:
    """Return the kinds of memory that a role belongs on, the best first. A CPU that computes reads weights often."""
    cxl_first = role is TensorRole.ACTIVATIONS or (role is TensorRole.COMPUTE_WEIGHTS and not cpu_computes)
    return (TierKind.CXL, TierKind.DRAM) if cxl_first else (TierKind.DRAM, TierKind.CXL)


# The `tier` decorator: says on a module class or instance where its tensors live. Imports no torch.
#
# [Note: Constructing a Decorated Class]
# While an object of a decorated class (or of a subclass) is under construction, `constructing_spec` returns what its
# class says, so that the allocator hook can place each weight from the first byte. It looks at the call stack for
# running ``__init__`` functions whose first argument is such an object. Nothing is wrapped, on purpose: LightningCLI
# and ``save_hyperparameters`` see the class's own ``__init__``, and what a subclass creates after
# ``super().__init__()`` counts as well. A constructor compiled to native code has no frame and is not seen.

_MARK = "_lightning_cxl_tier_spec"
_FIELD_OF_ROLE: Mapping[TensorRole, str] = {
    TensorRole.COMPUTE_WEIGHTS: "weights",
    TensorRole.ACTIVATIONS: "activations",
    **dict.fromkeys((TensorRole.COMPUTE_GRADS, TensorRole.MASTER_GRADS), "gradients"),
    **dict.fromkeys((TensorRole.MASTER_WEIGHTS, TensorRole.MOMENTUM, TensorRole.VARIANCE), "optimizer_state"),
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Tier names by what they are for; None leaves a field to whoever comes next in precedence."""

    weights: str | None = None
    gradients: str | None = None
    optimizer_state: str | None = None  # momentum, variance and master weights
    activations: str | None = None

    def for_role(self, role: TensorRole) -> str | None:
        field = _FIELD_OF_ROLE.get(role)
        return None if field is None else getattr(self, field)

    def or_else(self, other: "TierSpec | None") -> "TierSpec":
        if other is None:
            return self
        return TierSpec(*(getattr(self, field) or getattr(other, field) for field in SPEC_FIELDS))

    def __str__(self) -> str:
        return ", ".join(f"{field}={tier}" for field in SPEC_FIELDS if (tier := getattr(self, field)))


SPEC_FIELDS = tuple(field.name for field in fields(TierSpec))  # fields that a spec or a rule can place, in order

_MADE_FOR: contextvars.ContextVar[TierSpec | None] = contextvars.ContextVar("lightning_cxl_made_for", default=None)


def tier(
    all: str | None = None,
    /,
    *,
    weights: str | None = None,
    gradients: str | None = None,
    optimizer_state: str | None = None,
    activations: str | None = None,
) -> Callable[[_T], _T]:
    """Return a decorator that places the tensors of an ``nn.Module`` class or instance, and of what it contains.

    On an instance it beats `tier_rules`, on a class it is beaten by them; the nearest enclosing module that says
    something about a field decides. Decorating again adds fields and replaces those given again. Tier names are
    checked when a model is set up, because a program may be written on another machine than it runs on.

    Args:
        all: tier for every field that is not given by itself.
        weights: tier of the compute weights.
        gradients: tier of gradients on the host.
        optimizer_state: tier of momentum, variance and master weights.
        activations: tier of the inputs kept for the backward pass.

    Returns:
        A function that marks the class or instance and returns it, the same object.

    Raises:
        ConfigError: no tier given, a tier that is not a name, or something else than a module is decorated.

    Example::

        @lightning_cxl.tier(weights="cxl", activations="cxl", optimizer_state="dram")
        class Block(nn.Module): ...

        lightning_cxl.tier("dram")(model.lm_head)
    """
    given = {"weights": weights, "gradients": gradients, "optimizer_state": optimizer_state, "activations": activations}
    for field, name in {"all": all, **given}.items():
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(
                f"tier({field}={name!r}) is not a tier name. Write the name of a tier, such as 'dram' or 'cxl', "
                f'and call the decorator: @tier("cxl")'
            )
    spec = TierSpec(**given).or_else(None if all is None else TierSpec(all, all, all, all))
    if spec == TierSpec():
        raise ConfigError(f'tier() places nothing: give a tier name, as in tier("cxl"), or one of {SPEC_FIELDS}')

    def mark(target: _T) -> _T:
        if not callable(getattr(target, "named_modules", None)):
            kind = target.__name__ if isinstance(target, type) else f"a {type(target).__name__}"
            raise ConfigError(f"tier({spec}) decorates an nn.Module class or instance, got {kind}")
        own = vars(target).get(_MARK) if isinstance(target, type) else instance_spec(target)
        setattr(target, _MARK, spec.or_else(own))
        return target

    return mark


def _first_of(specs: Iterable[TierSpec | None]) -> TierSpec | None:
    """Return each field from the first that has it; None where there is no spec."""
    return functools.reduce(lambda one, other: other if one is None else one.or_else(other), specs, None)


def class_spec(cls: type) -> TierSpec | None:
    """Return what decorators on a class and its bases say, the nearest base first; None when none is decorated."""
    return _first_of(vars(base).get(_MARK) for base in cls.__mro__)


def instance_spec(module: object) -> TierSpec | None:
    """Return what `tier` says about this one object, not about its class; None when it was not decorated."""
    return getattr(module, "__dict__", {}).get(_MARK)


def owner_spec(module_path: Sequence[object]) -> TierSpec | None:
    """Return what decorators ask for the last of these modules; each contains the next. No rules, which need names."""
    nearest_first = module_path[::-1]
    return _first_of([*map(instance_spec, nearest_first), *(class_spec(type(module)) for module in nearest_first)])


@contextmanager
def constructing(spec: TierSpec | None) -> Iterator[None]:
    """Let this thread create tensors as if a class that `spec` decorates were under construction, until exit."""
    token = _MADE_FOR.set(spec)
    try:
        yield
    finally:
        _MADE_FOR.reset(token)


def constructing_spec() -> TierSpec | None:
    """Return what classes under construction say, innermost first: [Note: Constructing a Decorated Class]."""
    spec, frame = _MADE_FOR.get(), inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount > 0:
            spec = _first_of((spec, class_spec(type(frame.f_locals.get(code.co_varnames[0])))))
        frame = frame.f_back
    return spec


_ROLES_ON_SSD = (TensorRole.MOMENTUM, TensorRole.VARIANCE, TensorRole.MASTER_WEIGHTS)
_FIELDS_ON_SSD = ("optimizer_state", "weights", "activations")


def _cannot_lie_on_ssd(what: str, source: str) -> UnsupportedError:
    return UnsupportedError(
        f"{source} asks for {what} on tier 'ssd', and that cannot lie there yet. Only optimizer state of `CPUAdam` "
        "(momentum, variance, and what master weights have beyond bfloat16 weights), weights of units that stream, and "
        'inputs of units can lie there. Ask for these alone: {"optimizer_state": "ssd", "weights": "ssd", '
        '"activations": "ssd"}'
    )


_Choice = tuple[str, str]  # tier name, who asked for it


@dataclass(frozen=True, slots=True)
class ModuleTiers:
    """Requests of each module of one model; made by `resolve`."""

    choices: Mapping[str, Mapping[str, _Choice]]  # module name -> field of `TierSpec` -> (tier name, who asked)

    def lookup(self, module_name: str, role: TensorRole) -> tuple[str | None, str]:
        """Return (tier, who asked) for a role of a module; ``(None, "")`` leaves it to the policy.

        A module that was added to the model later answers as its nearest enclosing module that was there.
        """
        field = _FIELD_OF_ROLE.get(role)
        known = next((self.choices[name] for name in _self_and_ancestors(module_name) if name in self.choices), {})
        return (None, "") if field is None else known.get(field, (None, ""))


def resolve(
    named_modules: Iterable[tuple[str, object]], rules: Mapping[str, Mapping[str, str] | str], topology: Topology
) -> ModuleTiers:
    """Resolve what instances (`tier`), rules, and decorated classes ask for, in that precedence, for every module."""
    modules = dict(named_modules)
    by_rule = _check_rules(rules, list(modules), topology)
    by_instance = {name: instance_spec(module) for name, module in modules.items()}
    by_class = {name: class_spec(type(module)) for name, module in modules.items()}
    for name, module in modules.items():
        _check_spec(by_instance[name], f"tier(...) on {_show(name, module)}", topology)
        _check_spec(by_class[name], f"the decorator on class {type(module).__name__}", topology)
    choices: dict[str, dict[str, _Choice]] = {}
    for name in modules:
        lineage = [each for each in _self_and_ancestors(name) if each in modules]
        rules_here = [
            pattern for pattern in reversed(by_rule) if any(fnmatch.fnmatchcase(each, pattern) for each in lineage)
        ]
        by_precedence = [
            *((by_instance[each], f"tier(...) on {_show(each, modules[each])}") for each in lineage),
            *((by_rule[pattern], f"rule {pattern!r}") for pattern in rules_here),
            *((by_class[each], f"decorator on class {type(modules[each]).__name__}") for each in lineage),
        ]
        choices[name] = {
            field: (wanted, source)
            for spec, source in reversed(by_precedence)
            if spec is not None
            for field in SPEC_FIELDS
            if (wanted := getattr(spec, field)) is not None
        }
    return ModuleTiers(choices)


def _check_rules(
    rules: Mapping[str, Mapping[str, str] | str], names: list[str], topology: Topology
) -> dict[str, TierSpec]:
    specs = {}
    for pattern, wanted in rules.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            top = [name for name in names if name and "." not in name]
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            found = f"{'Closest' if close else 'The model has'}: {', '.join(map(repr, close or top))}"
            raise ConfigError(f"tier_rules: {pattern!r} matches no module. {found}")
        fields = dict.fromkeys(SPEC_FIELDS, wanted) if isinstance(wanted, str) else dict(wanted)
        for field in fields:
            if field not in SPEC_FIELDS:
                raise ConfigError(f"tier_rules: {pattern!r} has no field {field!r}; use {', '.join(SPEC_FIELDS)}")
        specs[pattern] = TierSpec(**fields)
        _check_spec(specs[pattern], f"tier_rules: {pattern!r}", topology)
    return specs


def _check_spec(spec: TierSpec | None, source: str, topology: Topology) -> None:
    for field in SPEC_FIELDS if spec is not None else ():
        tier = getattr(spec, field)
        try:
            if tier is not None:
                topology.tier(tier)
        except TierNotFoundError:
            raise TierNotFoundError(
                f"{source} asks for {field} on tier {tier!r}; {topology.what_there_is(tier)}"
            ) from None
        if tier == SSD and field not in _FIELDS_ON_SSD:
            raise _cannot_lie_on_ssd(field, source)


def _self_and_ancestors(name: str) -> list[str]:
    """Return a module's name and those of all that enclose it, nearest first, ending with the root ``""``."""
    parts = name.split(".") if name else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _show(name: str, module: object) -> str:
    return f"{name!r}" if name else f"the whole {type(module).__name__}"


class Placer:
    """Every tensor goes to the tier that is asked for, else where its role was decided to go, else to a preferred tier.

    The first choice stays first even when it is full, so that the allocator sees the spill and warns or refuses; among
    the tiers to spill to, those that hold the tensor come first. The decision is a split by role, with its reason.
    """

    def __init__(
        self,
        topology: Topology,
        free: Callable[[], Mapping[str, int]],
        *,
        cpu_computes: bool = False,
        splits: Mapping[TensorRole, Mapping[str, float]] | None = None,
        reasons: Mapping[TensorRole, str] | None = None,
    ) -> None:
        self.topology = topology
        self._free = free
        self._cpu_computes = cpu_computes
        self._splits = splits or {}
        self._reasons = reasons or {}

    def place(
        self, role: TensorRole, nbytes: int, *, tier: str | None = None, spec: TierSpec | None = None, source: str = ""
    ) -> Placement:
        if tier is None and spec is not None:
            tier, source = spec.for_role(role), source or f"tier({spec})"
            if tier == SSD and role is TensorRole.COMPUTE_WEIGHTS:
                tier = None  # they move there when their run begins
        if tier is not None and self.topology.tier(tier).kind is TierKind.SSD:  # raises where there is none
            if role not in _ROLES_ON_SSD:  # weights and inputs of units move there when their run begins
                raise _cannot_lie_on_ssd(role.value, source or "the request")
            return Placement((tier,), reason=source or "asked for explicitly")  # nothing spills
        free, names = self._free(), list(self.topology.names)
        split = self._splits.get(role, {}) if tier is None else {}
        if tier is not None:
            chosen, reason = [tier], source or "asked for explicitly"
        elif split:
            chosen = sorted((name for name in names if split.get(name, 0) > 0), key=lambda name: -split[name])
            reason = self._reasons.get(role, "")
        else:
            kinds = preferred_kinds(role, cpu_computes=self._cpu_computes)
            names = [each.name for kind in kinds for each in self.topology.select(kind=kind)]
            chosen, reason = names[:1], f"preferred for {role.value}"
        if not split and free.get(chosen[0], nbytes) < nbytes:
            reason += f"; {chosen[0]} has {format_bytes(free[chosen[0]])} free of {format_bytes(nbytes)} needed"
        others = [name for name in names if name not in chosen]
        others.sort(key=lambda name: free.get(name, nbytes) < nbytes)
        shares = tuple(split.get(name, 0.0) for name in (*chosen, *others)) if len(chosen) > 1 else ()
        return Placement((*chosen, *others), reason=reason, shares=shares)
