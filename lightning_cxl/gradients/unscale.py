"""A loss scaler, perhaps on a device, and gradients on the host."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_cxl.gradients.overflow import OverflowGuard
from lightning_cxl.gradients.replaced_method import ReplacedMethod
from lightning_cxl.optim.clipping import gradients
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.torch_private import unscale


class HostUnscale(ReplacedMethod):
    """`GradScaler._unscale_grads_` for gradients on the host.

    A scaler on a device copies its scale to the gradients' device without waiting, which is a race when that is the
    host: give it host copies that are complete. For `CPUAdam` nothing is multiplied: the step applies the factor, and
    the check uses the sums that were taken as gradients arrived.

    Args:
        scaler: whose method this replaces.
        unwrap: finds the optimizer in a wrapper of the framework.
        defers: whether the factor may be left to the optimizer's step, because no code reads gradients before it.
        guard: finds overflows, and counts them.
    """

    def __init__(
        self,
        scaler: Any,
        unwrap: Callable[[Any], torch.optim.Optimizer],
        defers: Callable[[torch.optim.Optimizer], bool],
        guard: OverflowGuard,
    ) -> None:
        super().__init__(partial(unscale, scaler))
        self._unwrap = unwrap
        self._defers = defers
        self._guard = guard
        self.factor = 1.0
        """What gradients still have to be multiplied by: the last factor that was left to a step."""

    def __call__(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        """Unscale gradients on the host; see `torch.amp.GradScaler`."""
        host_scale, found = inv_scale.cpu(), found_inf.cpu()
        target = self._unwrap(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        bad = self._guard.first_bad(parameters)
        if bad is not None:
            self._guard.refuse(target, bad, expected=True)
        self.factor = 1.0
        if not (isinstance(target, CPUAdam) and self._defers(target)):
            result = self._plain(optimizer, host_scale, found, allow_fp16)
            torch.autograd.graph.increment_version(gradients(parameters))  # torch's kernel leaves versions as they are
            return result
        # set, not multiplied: the step that would have used the factor of before may have been left out
        self.factor = target.grad_scale = float(host_scale)
        return {torch.device("cpu"): found.fill_(0.0 if bad is None else 1.0)}
