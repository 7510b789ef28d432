"""`ArrivedGradients`: gradients that came from the device since gradients were complete, until somebody gets them.

They are completed (they become ``.grad`` of the masters), or handed over to an update that runs behind the backward
([Note: Overlapped updates]), or forgotten when the backward has failed.
"""

from collections.abc import Iterable

import torch

from lightning_cxl.gradients.leaving import Gradient, Group, LeavingGradients
from lightning_cxl.gradients.sums import GradientSums
from lightning_cxl.optim.masters import WeightPair, is_on_host


class ArrivedGradients:
    """Keeps account of gradients on their way from the device. See [Note: Life of a gradient].

    Args:
        leaving: sends them to the host.
        sums: has the sum of each parameter's gradients so far.
    """

    def __init__(self, leaving: LeavingGradients, sums: GradientSums) -> None:
        self._leaving = leaving
        self._sums = sums
        self._pairs: dict[int, WeightPair] = {}  # whose gradient came, or was taken away for it, by id
        self._handed: dict[int, list[Group]] = {}  # of gradients that someone else takes care of, by id of the pair
        self._given: set[int] = set()  # ids of pairs handed over in this step

    def __contains__(self, pair: WeightPair) -> bool:
        """Whether the gradient of `pair` is here, in part or as a whole, and not in ``.grad``."""
        return id(pair) in self._pairs

    def take_away(self, pair: WeightPair) -> bool:
        """Take the gradient so far out of ``.grad``, once; return whether that was done now."""
        if id(pair) in self._pairs:
            return False  # of an earlier backward, or of another use of the parameter
        grad = pair.master.grad
        if grad is None or grad.layout is not torch.strided or grad.requires_grad:
            return False
        self._sums.so_far[id(pair)], pair.master.grad = grad, None
        self._pairs[id(pair)] = pair
        return True

    def add(self, pair: WeightPair, grad: torch.Tensor, key: int, unit: object, unit_size: int) -> None:
        """Let a gradient leave the device.

        Args:
            pair: of the parameter.
            grad: strided, on the device; changed by nobody from now on.
            key: of stochastic rounding.
            unit: of the parameter; None for a parameter that belongs to none.
            unit_size: how many gradients leave together.
        """
        is_first = id(pair) not in self._pairs
        self._pairs[id(pair)] = pair
        self._leaving.add(Gradient(pair, grad, key, is_first), unit, unit_size)

    def leave(self) -> None:
        """Let gradients leave that still wait for other gradients of their unit."""
        self._leaving.leave()

    def step_is_over(self) -> None:
        """Learn that what was handed over has no more gradients to come in this step."""
        self._given.clear()

    def was_given(self, pair: WeightPair) -> bool:
        """Return whether a gradient of `pair` was handed over in this step."""
        return id(pair) in self._given

    def hand_over(self, candidates: Iterable[WeightPair]) -> list[WeightPair]:
        """Return those of the candidates whose gradients have come from the device, as they came.

        The caller then gets each of these gradients with `take`; `complete` leaves them out.
        """
        own = {id(pair) for pair in candidates}
        pairs = [pair for key, pair in self._pairs.items() if key in own]
        own = {id(pair) for pair in pairs}
        groups = self._leaving.claim(own)
        for key in own:
            del self._pairs[key]
            self._handed[key] = [group for group in groups if key in group.pair_ids]
        self._given |= own
        return pairs

    def take(self, pair: WeightPair) -> torch.Tensor:
        """Return a gradient that was handed over, on the worker: after it has been folded; raises its error."""
        for group in self._handed.pop(id(pair)):
            group.fold.result()
        return self._sums.so_far.pop(id(pair))

    def can_be_shown(self) -> bool:
        """Return whether every master is on the host, as torch takes a gradient beside its parameter only."""
        return all(is_on_host(pair.master) for pair in self._pairs.values())

    def complete(self) -> None:
        """Return when every gradient that has come is where the optimizer reads it."""
        self._leaving.settle()
        for pair in self._pairs.values():
            pair.master.grad = self._sums.so_far.pop(id(pair))
        self._pairs.clear()

    def forget(self) -> None:
        """Drop the gradients that a failed backward has left here."""
        self._leaving.forget()
        self._leaving.settle()
        for key in self._pairs:
            self._sums.so_far.pop(key, None)
        self._pairs.clear()

    def close(self) -> None:
        """Let go of everything; nothing that still runs is waited for."""
        self._leaving.close()
        for state in (self._pairs, self._handed, self._sums.so_far):
            state.clear()
