"""The step of a user's own torch optimizer, run on the host with its state placed by the policy."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

AllocationScope = Callable[[], AbstractContextManager[Any]]
"""Opens a region in which host tensors that torch creates are placed as optimizer state."""


class HostStep:
    """Replaces `optimizer.step` of one optimizer object.

    The closure (forward and backward) runs first and outside the allocation scope; only the update itself runs inside
    it, and only as long as parameters without state appear, so that later steps pay nothing.

    Args:
        optimizer: any torch optimizer; its class's own `step` does the work.
        scope: where new optimizer state goes.
        before: called between closure and update, e.g. to wait for gradients on their way.
        after: called with the parameters that had a gradient, e.g. to write masters back.
    """

    # torch's learning-rate schedulers look for this mark to know that `_opt_called` is kept
    _wrapped_by_lr_sched = True

    def __init__(
        self,
        optimizer: Optimizer,
        scope: AllocationScope,
        before: Callable[[], None],
        after: Callable[[list[torch.Tensor]], None],
    ) -> None:
        self._optimizer = optimizer
        self._scope = scope
        self._before = before
        self._after = after
        self._seen: set[int] = set()  # ids of parameters whose state exists

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step; same contract as `torch.optim.Optimizer.step`."""
        optimizer = self._optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined]
        step = type(optimizer).step
        if isinstance(optimizer, LBFGS):  # evaluates the closure several times inside its step
            if closure is None:
                raise ValueError(
                    "LBFGS needs a closure: pass one to `step`, as Lightning's automatic optimization does"
                )
            result = step(optimizer, self._synchronised(closure))
            self._after(list(_parameters(optimizer)))
            return result
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before()
        active = [p for p in _parameters(optimizer) if p.grad is not None]
        new = {id(p) for p in active} - self._seen
        if new:
            with self._scope():
                step(optimizer)
            self._seen |= new
        else:
            step(optimizer)
        self._after(active)
        return loss

    def _synchronised(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        return _Synchronised(closure, lambda: self._after(list(_parameters(self._optimizer))), self._before)


class _Synchronised:
    """A closure for optimizers that evaluate it inside their step: masters go out before it, gradients come in after it."""

    def __init__(self, closure: Callable[[], Any], before: Callable[[], None], after: Callable[[], None]) -> None:
        self._closure = closure
        self._before = before
        self._after = after

    def __call__(self) -> Any:
        self._before()
        loss = self._closure()
        self._after()
        return loss


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
