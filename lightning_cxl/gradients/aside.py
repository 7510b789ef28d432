"""`Aside`: gradients so far, kept out of sight while the next one comes alone. See [Note: Life of a gradient]."""

from collections.abc import Iterable

import torch

from lightning_cxl.optim.masters import WeightPair


class Aside:
    """Takes ``.grad`` of shared parameters away before somebody else would add to it, and gives it back."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[WeightPair, torch.Tensor]] = {}  # by id of the pair

    def __contains__(self, pair: WeightPair) -> bool:
        return id(pair) in self._kept

    def take(self, pair: WeightPair) -> None:
        """Take the gradient so far away, if it is one that more can be added to."""
        self._kept.pop(id(pair), None)  # of a backward that failed: the user may have zeroed gradients since
        grad = pair.master.grad
        if grad is not None and grad.layout is torch.strided and not grad.requires_grad:
            self._kept[id(pair)], pair.master.grad = (pair, grad), None

    def pop(self, pair: WeightPair) -> torch.Tensor | None:
        """Return the gradient so far, and keep it no longer."""
        _, grad = self._kept.pop(id(pair), (None, None))
        return grad

    def begin(self, pairs: Iterable[WeightPair]) -> None:
        """Forget what a backward that failed has left, and take the gradients of these pairs away."""
        self._kept.clear()
        for pair in pairs:
            self.take(pair)

    def give_back(self) -> None:
        """Give back the gradients of all pairs for which no other has come."""
        while self._kept:
            _, (pair, grad) = self._kept.popitem()
            pair.master.grad = grad

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
