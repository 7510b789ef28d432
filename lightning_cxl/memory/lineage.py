"""Which module a host tensor of an optimizer step belongs to: `ParameterOwners` and `Lineage`."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from lightning_cxl.placement.decorators import TierSpec

_NOWHERE = 0


class ParameterOwners:
    """Finds the `TierSpec` of a parameter from the parameter, its gradient, or anything that shares their memory.

    An optimizer makes its state from ``p``, ``p.grad`` or ``p.grad.detach()``; inside a dispatch mode the latter are
    new Python objects, so memory decides, not identity.

    Args:
        specs: parameters with what their modules ask for.
    """

    def __init__(self, specs: Iterable[tuple[Tensor, TierSpec | None]] = ()) -> None:
        self._specs: list[tuple[Tensor, TierSpec]] = []
        self._sizes: set[int] = set()
        self._by_address: dict[int, tuple[Tensor, TierSpec]] = {}
        for parameter, spec in specs:
            self.add(parameter, spec)

    def add(self, parameter: Tensor, spec: TierSpec | None) -> None:
        """Add one parameter; None (its module asks for nothing) is forgotten."""
        if spec is not None and parameter.numel():
            self._specs.append((parameter, spec))
            self._sizes.add(parameter.numel())

    def __call__(self, tensor: object) -> TierSpec | None:
        """Return what the module asks for whose parameter or gradient `tensor` is, or None."""
        if not isinstance(tensor, Tensor) or tensor.numel() not in self._sizes:
            return None
        address = _address(tensor)
        if not self._holds(address):
            self._by_address = {a: (p, spec) for p, spec in self._specs for a in _addresses(p)}
        return self._by_address[address][1] if self._holds(address) else None

    def _holds(self, address: int) -> bool:
        """Whether the address is known, and still of the parameter it was of."""
        known = self._by_address.get(address)
        return known is not None and address in _addresses(known[0])


class Lineage:
    """Follows ownership through the arithmetic before a state tensor is made.

    ``SGD(momentum=0.9, weight_decay=0.1)`` clones ``p.grad + 0.1 * p``: no parameter's memory. `follow` remembers that
    this sum has the owner of ``p.grad``.

    Args:
        owner: knows parameters and gradients.
    """

    def __init__(self, owner: Callable[[object], TierSpec | None]) -> None:
        self._owner = owner
        self._derived: dict[int, tuple[weakref.ref[Tensor], TierSpec]] = {}

    def spec(self, tensor: Tensor) -> TierSpec | None:
        """Return what the module asks for that a tensor comes from, or None."""
        spec = self._owner(tensor)
        if spec is not None or not self._derived:
            return spec
        address = _address(tensor)
        origin, spec = self._derived.get(address, (None, None))
        alive = None if origin is None else origin()
        return spec if alive is not None and _address(alive) == address else None

    def follow(self, sources: Any, results: Any) -> None:
        """Note what an operator's results come from: each from its source, where they have equally many elements."""
        several = isinstance(sources, (list, tuple)) and isinstance(results, (list, tuple))
        for source, result in zip(sources, results, strict=False) if several else [(sources, results)]:
            if isinstance(source, Tensor) and isinstance(result, Tensor) and source.numel() == result.numel():
                spec = None if source is result else self.spec(source)
                address = _address(result)
                if spec is not None and address not in (_NOWHERE, _address(source)):
                    self._derived[address] = (weakref.ref(result), spec)


def _addresses(parameter: Tensor) -> set[int]:
    """Return where a parameter and its gradient are now."""
    grad = parameter.grad
    return {_address(parameter)} | (set() if grad is None else {_address(grad)})


def _address(tensor: Tensor) -> int:
    """Return the first byte of a tensor's storage; `_NOWHERE` when it has none (sparse, meta, subclasses)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return _NOWHERE
