"""`HostAllocationMode`: host tensors that torch creates land on the tier that is asked for.

[Note: What the Hook Touches]
A dispatch mode sees every operator of its thread. An operator that creates a host tensor is answered with memory of
ours of the same shape, strides and dtype:
* ``empty*``, ``zeros*``, ``ones*``, ``full*`` run on the meta device (no bytes, torch's own checks and strides) and the
  tensor is then made, and filled, in place;
* ``clone``, ``.to``, ``pin_memory`` copy straight from the source into our memory;
* every other factory (random numbers, ranges, windows) runs as it is, so that it draws the same numbers, and its result
  is copied; so is what ``torch.tensor`` made, but not what shares memory with somebody else (``torch.from_numpy``).
Arithmetic creates tensors as well, and those are left alone: they come and go. Only while weights are being made (a
decorated module is under construction, or the role is COMPUTE_WEIGHTS) are they copied too, because
``nn.Parameter(torch.randn(n) * 0.02)`` is a weight. Never touched: results on other devices, tensors without elements
(torch resizes those), views, ``out=``, sparse and quantized tensors, tensor subclasses with a dispatch of their own,
storages copied or read as a whole (``torch.load``, ``deepcopy`` of a tensor that is no parameter), a forked child of
this process (it does not inherit the memory), and anything made inside `ordinary_memory`.
"""

import contextvars
import enum
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_cxl import torch_private
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory import host_memory as kernel
from lightning_cxl.memory.host_memory import HostMemory
from lightning_cxl.memory.placement import Placer, TensorRole, TierSpec, constructing, constructing_spec

_OPTIONS = {"dtype", "layout", "device", "pin_memory"}
_EMPTY = {"empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided"}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}
_ONES = {"ones", "ones_like", "new_ones"}
_FULL = {"full", "full_like", "new_full"}
_COPIED = (torch_private.TO_COPY, torch_private.PIN_MEMORY)
_COPIES = {"clone", *(torch_private.schema_of(operator).name.partition("::")[2] for operator in _COPIED)}
_PAUSED = contextvars.ContextVar("lightning_cxl_hook_paused", default=False)


@contextmanager
def ordinary_memory() -> Iterator[None]:
    """Make the hook leave alone what torch creates in this thread (context), until exit: it is about to be freed."""
    token = _PAUSED.set(True)
    try:
        yield
    finally:
        _PAUSED.reset(token)


def is_placing() -> bool:
    return not _PAUSED.get() and any(isinstance(mode, HostAllocationMode) for mode in torch_private.dispatch_modes())


class _Kind(enum.Enum):
    FILLED = enum.auto()  # empty, zeros, ones, full
    COPY = enum.auto()  # of the first argument
    LIFT = enum.auto()  # how torch.tensor announces what it made
    FACTORY = enum.auto()  # everything else that takes tensor options
    COMPUTED = enum.auto()  # a new tensor, but no factory
    OTHER = enum.auto()


class HostAllocationMode(torch_private.TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """While active, host tensors that torch creates in this thread go where role, tier and decorators say.

    Which tier: the innermost of `tier` and the decorated module under construction; else the policy.
    """

    def __init__(
        self, memory: HostMemory, place: Placer, *, role: TensorRole | None = None, tier: str | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if tier is not None:
            place.topology.tier(tier)
        self._memory = memory
        self._place = place
        self._role = role
        self._tier = tier
        self._outer_spec = constructing_spec()
        self._pid = os.getpid()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind is _Kind.OTHER or _PAUSED.get() or os.getpid() != self._pid:
            return func(*args, **kwargs)
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if source is not None and not _is_plain(source):
            return func(*args, **kwargs)
        if kind is _Kind.FILLED and _makes_host_tensor(source, kwargs):
            like = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
            is_ours = like.numel() and not like.is_quantized
            return _fill(func, args, self._new(like, kwargs)) if is_ours else func(*args, **kwargs)
        if kind is _Kind.COPY and source is not None and source.numel():
            return self._copy(func, source, args, kwargs)
        if kind is _Kind.LIFT and source is not None:
            return self._adopt(source) if source.untyped_storage().resizable() else func(source)
        if kind is _Kind.FACTORY and _makes_host_tensor(source, kwargs):
            plain = {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs
            return self._adopt(func(*args, **plain), bool(kwargs.get("pin_memory")))
        makes_weights = self._role is TensorRole.COMPUTE_WEIGHTS
        if kind is _Kind.COMPUTED and (makes_weights or (self._role is None and constructing_spec() is not None)):
            result = func(*args, **kwargs)
            return result if _shares_memory(result, args) else self._adopt(result)
        return func(*args, **kwargs)

    def _copy(self, func: Any, source: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Answer ``clone``, ``.to`` or ``pin_memory``; the copy is complete on return, whatever ``non_blocking`` is."""
        if func is torch_private.TO_COPY:
            if not _makes_host_tensor(source, kwargs):
                return func(*args, **kwargs)  # type: ignore[no-any-return]
            like = func(source, **{**kwargs, "device": "meta", "pin_memory": False})
        elif source.device.type != "cpu":
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        else:
            memory_format = kwargs.get("memory_format") or torch.preserve_format
            like = torch.empty_like(source, device="meta", memory_format=memory_format)
        new = self._new(like, {"pin_memory": func is torch_private.PIN_MEMORY or kwargs.get("pin_memory")})
        return new.copy_(source)

    def _adopt(self, result: Tensor, pinned: bool = False) -> Tensor:
        if not _is_plain(result) or result.device.type != "cpu" or not result.numel():
            return result
        return self._new(result, {"pin_memory": pinned or result.is_pinned()}).copy_(result)

    def _new(self, like: Tensor, options: Mapping[str, Any]) -> Tensor:
        count, role = kernel.storage_extent(like), self._role or TensorRole.COMPUTE_WEIGHTS
        spec = constructing_spec()
        is_inner = spec is not None and spec is not self._outer_spec
        tier = None if is_inner and spec is not None and spec.for_role(role) is not None else self._tier
        placement = self._place.place(role, count * like.dtype.itemsize, tier=tier, spec=spec)
        if options.get("pin_memory"):
            placement = replace(placement, pinned=True)
        flat = self._memory.tensor((count,), like.dtype, placement, role)
        return flat.as_strided(like.shape, like.stride())


@functools.cache
def _kind(func: Any) -> _Kind:
    schema = torch_private.schema_of(func)
    name = schema.name.partition("::")[2]
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        return _Kind.OTHER
    if name == "lift_fresh":
        return _Kind.LIFT
    if schema.returns[0].alias_info is not None or not schema.name.startswith("aten::") or name == "from_file":
        return _Kind.OTHER
    if name in _COPIES:
        return _Kind.COPY
    if name in _EMPTY | _ZEROS | _ONES | _FULL:
        return _Kind.FILLED
    options = {argument.name for argument in schema.arguments if argument.kwarg_only}
    if (options >= _OPTIONS and not name.startswith("_")) or name == "normal":
        return _Kind.FACTORY
    return _Kind.COMPUTED


def _fill(func: Any, args: tuple[Any, ...], new: Tensor) -> Tensor:
    name = torch_private.schema_of(func).name.partition("::")[2]
    if name in _ZEROS:
        return new.zero_()
    if name in _ONES:
        return new.fill_(1)
    if name in _FULL:
        return new.fill_(args[-1])
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        if new.dtype.is_floating_point or new.dtype.is_complex:
            return new.fill_(float("nan"))
        return new.fill_(True if new.dtype == torch.bool else torch.iinfo(new.dtype).max)
    return new


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not torch_private.is_zero_tensor(tensor)
    )


def _makes_host_tensor(source: Tensor | None, kwargs: Mapping[str, Any]) -> bool:
    if kwargs.get("layout") not in (None, torch.strided):
        return False
    device = kwargs.get("device")
    if device is None:
        device = torch.get_default_device() if source is None else source.device
    return bool(torch.device(device).type == "cpu")


def _shares_memory(result: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether a result is one of the arguments, though its operator does not say so."""
    if not _is_plain(result) or result.device.type != "cpu":
        return False
    address = result.untyped_storage().data_ptr()
    return any(
        isinstance(arg, Tensor) and _is_plain(arg) and arg.untyped_storage().data_ptr() == address for arg in args
    )


# Which host memory `lightning_cxl.empty` and `host_allocation` use: the innermost active one, else a default.


@dataclass(frozen=True, eq=False, slots=True)
class Scope:
    """Host memory and who decides where in it a tensor goes."""

    memory: HostMemory
    placer: Placer
    pid: int
    """The process that made it. A forked child does not inherit the memory, so it does not use the scope."""


_REUSE_BELOW = 2**20  # outside of a run nobody makes the same tensors again and again, and nobody calls `trim`

# innermost last
_ACTIVE: contextvars.ContextVar[tuple[Scope, ...]] = contextvars.ContextVar("lightning_cxl_scopes", default=())


@contextmanager
def activate(memory: HostMemory, placer: Placer) -> Iterator[Scope]:
    """Make `memory` and `placer` the ones in use in this thread until exit, whatever else is activated meanwhile."""
    scope = Scope(memory, placer, os.getpid())
    _ACTIVE.set((*_ACTIVE.get(), scope))
    try:
        yield scope
    finally:
        _ACTIVE.set(tuple(other for other in _ACTIVE.get() if other is not scope))


def current() -> Scope:
    """Return the innermost active scope of this process, else its default: every tier, no budgets."""
    return active() or _default(os.getpid())


def active() -> Scope | None:
    """Return the innermost active scope of this process, None outside of all."""
    return next(iter(_active()), None)


def _active() -> list[Scope]:
    pid = os.getpid()
    # a scope that was left in another thread is still among those of this one
    return [scope for scope in reversed(_ACTIVE.get()) if scope.pid == pid and not scope.memory.is_closed]


@functools.cache
def _default(pid: int) -> Scope:
    topology = Topology.detect()
    # pinned is what asks for it; the policy asks for nothing pinned
    memory = HostMemory(topology, pin=True, reuse_below=_REUSE_BELOW)
    return Scope(memory, Placer(topology, memory.free_bytes), pid)


def new_weight(like: torch.Tensor, dtype: torch.dtype, spec: TierSpec | None) -> torch.Tensor:
    """Return uninitialised memory with the shape and strides of a tensor on the meta device.

    Inside a run, or where `host_allocation` is active, it lies where that says; elsewhere it is ordinary memory. On
    torch's default device, so that weights of a model that is built on a GPU come into being there.
    """
    device = torch.get_default_device()
    used = active()
    with constructing(spec):
        if used is None or is_placing() or device.type != "cpu":
            return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)
        with HostAllocationMode(used.memory, used.placer, role=TensorRole.COMPUTE_WEIGHTS):
            return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)


@contextmanager
def host_allocation(tier: str | None = None, role: TensorRole | str | None = None) -> Iterator[None]:
    """Make torch's own host-tensor creation obey the placement policy in this thread, until exit.

    ``torch.empty``, ``zeros``, ``randn``, ``tensor``, ``clone``, ``.to("cpu")``, ``pin_memory`` and the like then
    return ordinary tensors whose bytes lie where `tier` or the decorated module under construction says, of these two
    the innermost; else where the policy puts `role`. Not affected: views, ``out=``, ``torch.from_numpy``,
    ``torch.load``, ``deepcopy`` of tensors that are no parameters, other threads, and results of arithmetic outside of
    a decorated module's constructor. Such a tensor cannot be resized in place to more elements.

    Args:
        tier: name of a tier, e.g. ``"cxl"``.
        role: what the tensors are for, e.g. ``"activations"``. Weights when None.

    Raises:
        TierNotFoundError: no such tier; the message names those that exist.
        ConfigError: no such role.
        TierFullError: inside, when a tensor fits nowhere.

    Example::

        with lightning_cxl.host_allocation(tier="cxl"):
            cache = torch.zeros(1024, 1024)
    """
    used = current()
    with HostAllocationMode(used.memory, used.placer, role=None if role is None else _role(role), tier=tier):
        yield


def empty(
    shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    tier: str | None = None,
    pinned: bool = False,
    role: TensorRole | str | None = None,
) -> torch.Tensor:
    """Return an uninitialised contiguous host tensor on a tier.

    Args:
        shape: its shape.
        dtype: torch's default dtype when None.
        tier: name of a tier; None leaves it to the decorated module under construction, else to the policy.
        pinned: page-lock it for the device; without a device it stays pageable.
        role: what it is for, see `TensorRole`; weights when None.

    Raises:
        TierNotFoundError: no such tier; the message names those that exist.
        ConfigError: no such role.
        ValueError: a negative size.
        TierFullError: it fits nowhere.
    """
    used = current()
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = dtype or torch.get_default_dtype()
    wanted = TensorRole.COMPUTE_WEIGHTS if role is None else _role(role)
    nbytes = max(0, prod(shape)) * dtype.itemsize
    placement = used.placer.place(wanted, nbytes, tier=tier, spec=constructing_spec())
    return used.memory.tensor(shape, dtype, replace(placement, pinned=True) if pinned else placement, wanted)


def residency(tensor: torch.Tensor) -> dict[str, int]:
    """Return how many bytes of a tensor each tier holds now, asked from the kernel.

    Bytes that no page backs yet have the key ``"unbacked"``, those on a device its name. Bytes of an emulated tier
    carry that tier's name as long as the memory they came from is in use, else that of the real tier.

    Raises:
        PlacementError: the kernel refuses to say.
    """
    used = current()
    if tensor.layout is torch.strided and tensor.is_cpu:
        in_use = [*_active(), *([_default(os.getpid())] if _default.cache_info().currsize else ())]
        used = next((scope for scope in in_use if scope.memory.tier_at(tensor.data_ptr()) is not None), used)
    return kernel.residency(tensor, used.placer.topology, used.memory)


def _role(role: TensorRole | str) -> TensorRole:
    try:
        return TensorRole(role)
    except ValueError:
        known = ", ".join(repr(known.value) for known in TensorRole)
        raise ConfigError(f"there is no tensor role {role!r}; choose one of: {known}") from None
