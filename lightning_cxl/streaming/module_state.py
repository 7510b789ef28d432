"""What a unit's forward can read and change in its modules, kept so that a recompute sees the same and changes nothing.

[Note: Replaying module state]
A recompute runs a unit's forward a second time. Batch-norm statistics, counters, power-iteration vectors and lists of
auxiliary losses must not be updated twice, and the recompute must read the values that the forward read, or gradients
are wrong without any error. So the start of each call is recorded: copies of buffers and of plain tensor attributes,
shallow copies of plain list, dict and set attributes, all other attributes by reference (which holds counters and the
`training` flag). `replay` binds fresh copies of these to the modules' names and afterwards binds what was there before:
the live objects are never written, so no version counter moves and no graph that has saved one of them is disturbed.

Versions do not tell whether a forward changed a buffer (`native_batch_norm` and ``.data`` do not count), so small
tensors are always copied, and large ones (causal masks) are compared by value after the forward and let go when equal.
Parameters are not copied: one that was changed in place between forward and recompute is an error, as in autograd;
their `requires_grad` is shown as it was, since it decides what a forward saves.
Not seen: state outside the unit's modules, in objects behind an attribute, or in containers inside containers.
"""

import collections
import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_cxl.streaming.awaited import peek

_SMALL_NUMEL = 1 << 14
_INTERNAL = (frozenset(nn.Module().__dict__) - {"training"}) | {"forward"}
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's version counter; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def stale_error(what: str, version: int | None, expected: int | None) -> RuntimeError:
    """Return the error for a tensor that changed between forward and recompute; autograd has the same."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {version}, the forward saw version {expected}. Run backward before changing it, or change a clone."
    )


class ModuleState:
    """The state of a unit's modules at the start of one call. See [Note: Replaying module state].

    Args:
        unit: its forward is about to run; `settle` must be called when it has returned.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit
        kept: dict[int, _Kept] = {}
        self._before = [
            (module, _keep(_attributes(module), kept), _keep(module._buffers, kept)) for module in unit.modules()
        ]
        self._unsettled = list(kept.values())
        self._parameters: list[tuple[nn.Parameter, int | None, bool]] = []  # version and requires_grad in the forward

    def settle(self) -> None:
        """Let go of what the forward did not change and note which parameters it used."""
        for kept in self._unsettled:
            kept.settle()
        self._unsettled = []
        self._parameters = [(each, version_of(each), each.requires_grad) for each in peek(self._unit)]

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Show the modules as the call found them; afterwards, as they are now.

        Raises:
            RuntimeError: a parameter, or a tensor kept by reference, has changed in place since.
        """
        self._check_parameters()
        fresh: dict[int, Any] = {}
        past = [(_fresh(attributes, fresh), _fresh(buffers, fresh)) for _, attributes, buffers in self._before]
        present = [(module, _attributes(module), dict(module._buffers)) for module, _, _ in self._before]
        toggled = [(each, then) for each, _, then in self._parameters if each.requires_grad != then]
        try:
            for (module, _, _), (attributes, buffers) in zip(self._before, past, strict=True):
                _bind(module, attributes, buffers)
            for parameter, then in toggled:
                parameter.requires_grad_(then)
            yield
        finally:
            for parameter, then in toggled:
                parameter.requires_grad_(not then)
            for module, attributes, buffers in present:
                _bind(module, attributes, buffers)

    def _check_parameters(self) -> None:
        for parameter, version, _ in self._parameters:
            if version_of(parameter) != version:
                names = [name for name, other in self._unit.named_parameters() if other is parameter]
                what = f"parameter `{names[0] if names else '?'}` of {type(self._unit).__name__}"
                raise stale_error(what, version_of(parameter), version)


class _Kept:
    """A tensor or container as it was at the start of a call."""

    __slots__ = ("_copy", "_original", "_version")

    def __init__(self, original: Any) -> None:
        self._original: Any = original
        self._copy: Any = _copy_of(original)
        self._version: int | None = None

    def settle(self) -> None:
        """Keep either the copy, or the original where copying again is dear and it has not changed."""
        original = self._original
        if isinstance(original, torch.Tensor) and original.numel() > _SMALL_NUMEL and _same(original, self._copy):
            self._copy, self._version = None, version_of(original)
        else:
            self._original = None

    def fresh(self) -> Any:
        """Return a copy of its own for one recompute (the unchanged original itself where that is kept)."""
        if self._copy is not None:
            return _copy_of(self._copy)
        if version_of(self._original) != self._version:
            what = f"a buffer of shape {tuple(self._original.shape)} and {self._original.dtype}"
            raise stale_error(what, version_of(self._original), self._version)
        return self._original


def _keep(values: Mapping[str, Any], kept: dict[int, _Kept]) -> dict[str, Any]:
    """Return `values` with what can change in place wrapped; an object under several names is wrapped once."""
    return {name: _keep_one(value, kept) if _is_copied(value) else value for name, value in values.items()}


def _keep_one(value: Any, kept: dict[int, _Kept]) -> _Kept:
    if id(value) not in kept:
        kept[id(value)] = _Kept(value)
    return kept[id(value)]


def _fresh(values: Mapping[str, Any], fresh: dict[int, Any]) -> dict[str, Any]:
    for value in values.values():
        if isinstance(value, _Kept) and id(value) not in fresh:
            fresh[id(value)] = value.fresh()
    return {name: fresh[id(value)] if isinstance(value, _Kept) else value for name, value in values.items()}


def _is_copied(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # one that carries gradient belongs to a graph and is replaced, not written
        return not isinstance(value, nn.Parameter) and not value.requires_grad
    return type(value) in _CONTAINERS


def _copy_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            return value.clone()
    return copy.copy(value)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left, right)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _INTERNAL}


def _bind(module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
    for name in [name for name in module.__dict__ if name not in _INTERNAL and name not in attributes]:
        del module.__dict__[name]
    module.__dict__.update(attributes)
    module._buffers.clear()
    module._buffers.update(buffers)
