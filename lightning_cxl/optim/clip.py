"""Clipping of gradients by their norm, folded into the optimizer's own sweep."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.meter import GradientMeter


class HostClip:
    """`clip_grad_by_norm` of a precision plugin: for `CPUAdam` only the factor is computed, the step applies it.

    The norm comes from the sums that were taken as gradients arrived. ``.grad`` keeps the values from before clipping.

    Args:
        plain: what the plugin does itself; used for other optimizers.
        unwrap: finds the optimizer in a wrapper of the framework.
        meter: measures what was not measured yet.
    """

    def __init__(
        self, plain: Callable[..., Any], unwrap: Callable[[Any], torch.optim.Optimizer], meter: GradientMeter
    ) -> None:
        self._plain = plain
        self._unwrap = unwrap
        self._meter = meter

    def __call__(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients of `optimizer` to a total norm of `clip_val`."""
        target = self._unwrap(optimizer)
        if isinstance(target, CPUAdam):
            target.clip_grad_norm_(clip_val, meter=self._meter)
        else:
            self._plain(optimizer, clip_val)
