"""Clipping of gradients by their norm, folded into the optimizer's own sweep."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_cxl.gradients.overflow import OverflowGuard
from lightning_cxl.gradients.replaced_method import ReplacedMethod
from lightning_cxl.gradients.unscale import HostUnscale
from lightning_cxl.optim.cpu_adam import CPUAdam


class HostClip(ReplacedMethod):
    """`clip_grad_by_norm` of a precision plugin: for `CPUAdam` only the factor is computed, the step applies it.

    The norm comes from the sums that were taken as gradients arrived. ``.grad`` keeps the values from before clipping.

    Args:
        plain: what the plugin does itself; used for other optimizers, and where the factor is not left to the step.
        unwrap: finds the optimizer in a wrapper of the framework.
        defers: whether the factor may be left to the optimizer's step, because no code reads gradients before it.
        guard: told before gradients are clipped in place, which makes all of them NaN when one is.
        unscale: has left a factor to the step, too; None without a loss scaler.
    """

    def __init__(
        self,
        plain: Callable[..., Any],
        unwrap: Callable[[Any], torch.optim.Optimizer],
        defers: Callable[[torch.optim.Optimizer], bool],
        guard: OverflowGuard,
        unscale: HostUnscale | None,
    ) -> None:
        super().__init__(plain)
        self._unwrap = unwrap
        self._defers = defers
        self._guard = guard
        self._unscale = unscale

    def __call__(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients of `optimizer` to a total norm of `clip_val`."""
        target = self._unwrap(optimizer)
        if isinstance(target, CPUAdam) and self._defers(target):
            target.clip_grad_norm_(clip_val, scale=1.0 if self._unscale is None else self._unscale.factor)
        else:
            self._guard.look(target)
            self._plain(optimizer, clip_val)
