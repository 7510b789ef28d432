"""The `tier` decorator: says on a module class or instance where its tensors live. Imports no torch.

[Note: Constructing a Decorated Class]
While an object of a decorated class (or of a subclass) is under construction, its `TierSpec` is what
`constructing_spec()` returns, so that the allocator hook can place each weight from the first byte. The class's
``__init__`` is replaced by a `_ConstructingInit`. Read from the class it is the plain function, so signatures, source
code and explicit base calls look untouched (LightningCLI and ``save_hyperparameters`` read them). Read from an
instance it is the plain method if that instance is already under construction, else a method that enters the spec
around it. Subclasses get one of their own, when they are defined or when their base is decorated, so that what their
``__init__`` creates after ``super().__init__()`` counts too.
"""

import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from lightning_cxl.errors import ConfigError
from lightning_cxl.tiers.placement import TensorRole

_MARK = "_lightning_cxl_tier_spec"
_FIELD_OF_ROLE: Mapping[TensorRole, str] = {
    TensorRole.COMPUTE_WEIGHTS: "weights",
    TensorRole.COMPUTE_GRADS: "gradients",
    TensorRole.MASTER_WEIGHTS: "optimizer_state",
    TensorRole.MASTER_GRADS: "gradients",
    TensorRole.MOMENTUM: "optimizer_state",
    TensorRole.VARIANCE: "optimizer_state",
    TensorRole.ACTIVATIONS: "activations",
}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Tier names by what they are for; None leaves a field to whoever comes next in precedence."""

    weights: str | None = None
    gradients: str | None = None
    optimizer_state: str | None = None
    """Momentum, variance and master weights."""
    activations: str | None = None

    def for_role(self, role: TensorRole) -> str | None:
        """Return the tier asked for a role; always None for staging buffers, which belong to no module."""
        field = _FIELD_OF_ROLE.get(role)
        return None if field is None else getattr(self, field)

    def or_else(self, other: "TierSpec | None") -> "TierSpec":
        """Return this spec with its empty fields filled from `other`."""
        if other is None:
            return self
        return TierSpec(*(getattr(self, field) or getattr(other, field) for field in SPEC_FIELDS))

    def __str__(self) -> str:
        """Return e.g. ``"weights=cxl, activations=cxl"``."""
        return ", ".join(f"{field}={tier}" for field in SPEC_FIELDS if (tier := getattr(self, field)))


SPEC_FIELDS = tuple(field.name for field in fields(TierSpec))
"""What a spec or a rule can place, in order."""


def field_of_role(role: TensorRole) -> str | None:
    """Return the field of a `TierSpec` that decides about a role, None for staging buffers."""
    return _FIELD_OF_ROLE.get(role)


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
    given = {
        "weights": weights,
        "gradients": gradients,
        "optimizer_state": optimizer_state,
        "activations": activations,
    }
    for field, name in {"all": all, **given}.items():
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(
                f"tier({field}={name!r}) is not a tier name. Write the name of a tier, such as 'dram' or 'cxl', "
                f'and call the decorator: @tier("cxl")'
            )
    spec = TierSpec(**given).or_else(None if all is None else TierSpec(all, all, all, all))
    if spec == TierSpec():
        raise ConfigError(f'tier() places nothing: give a tier name, as in tier("cxl"), or one of {SPEC_FIELDS}')
    return _Mark(spec)


def class_spec(cls: type) -> TierSpec | None:
    """Return what decorators on a class and its bases say, the nearest base first; None when none is decorated."""
    spec: TierSpec | None = None
    for base in cls.__mro__:
        mark = vars(base).get(_MARK)
        if mark is not None:
            spec = mark if spec is None else spec.or_else(mark)
    return spec


def instance_spec(module: object) -> TierSpec | None:
    """Return what `tier` says about this one object, not about its class; None when it was not decorated."""
    spec: TierSpec | None = getattr(module, "__dict__", {}).get(_MARK)
    return spec


def constructing_spec() -> TierSpec | None:
    """Return the spec of the innermost decorated class under construction, empty fields filled from outer ones."""
    stack = _CONSTRUCTING.get()
    return stack[-1][1] if stack else None


# (object under construction, its spec), outermost first
_CONSTRUCTING: contextvars.ContextVar[tuple[tuple[object, TierSpec], ...]] = contextvars.ContextVar(
    "lightning_cxl_constructing", default=()
)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What `tier` returns: marks a class or an instance with a spec."""

    spec: TierSpec

    def __call__(self, target: _T) -> _T:
        if not callable(getattr(target, "named_modules", None)):
            kind = target.__name__ if isinstance(target, type) else f"a {type(target).__name__}"
            raise ConfigError(f"tier({self.spec}) decorates an nn.Module class or instance, got {kind}")
        if isinstance(target, type):
            if _MARK not in vars(target):
                setattr(target, "__init_subclass__", _subclass_hook(target))  # noqa: B010  mypy forbids an assignment
                _watch_tree(target)
            setattr(target, _MARK, self.spec.or_else(vars(target).get(_MARK)))
        else:
            setattr(target, _MARK, self.spec.or_else(instance_spec(target)))
        return target


class _ConstructingInit:
    """Stands in for the ``__init__`` of a decorated class. See [Note: Constructing a Decorated Class]."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return self.function
        method = self.function.__get__(instance, owner)
        if any(instance is other for other, _ in _CONSTRUCTING.get()):
            return method
        return _Construction(instance, method)


@dataclass(frozen=True, slots=True)
class _Construction:
    """A bound ``__init__`` that enters the spec of its instance's class."""

    instance: object
    method: Callable[..., None]

    def __call__(self, /, *args: Any, **kwargs: Any) -> None:
        spec = class_spec(type(self.instance))
        assert spec is not None, "only decorated classes and their subclasses are watched"
        token = _CONSTRUCTING.set((*_CONSTRUCTING.get(), (self.instance, spec.or_else(constructing_spec()))))
        try:
            self.method(*args, **kwargs)
        finally:
            _CONSTRUCTING.reset(token)


def _subclass_hook(decorated: type[Any]) -> Any:
    """Return an ``__init_subclass__`` for a decorated class that does what it did, then watches the new class."""
    own = vars(decorated).get("__init_subclass__")

    def __init_subclass__(new_class: type[Any], /, **kwargs: Any) -> None:
        if own is not None:
            own.__get__(None, new_class)(**kwargs)
        else:
            super(decorated, new_class).__init_subclass__(**kwargs)
        _watch_init(new_class)

    return classmethod(__init_subclass__)


def _watch_tree(cls: type[Any]) -> None:
    """Watch the constructors of a class and of the subclasses that it already has."""
    _watch_init(cls)
    for subclass in cls.__subclasses__():
        _watch_tree(subclass)


def _watch_init(cls: type) -> None:
    first = next(vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base))
    if not isinstance(first, _ConstructingInit):
        setattr(cls, "__init__", _ConstructingInit(first))  # noqa: B010  mypy forbids an assignment
