"""A loss scaler, perhaps on a device, and gradients on the host."""

from typing import Any

import torch
from torch import Tensor

from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.meter import gradients
from lightning_cxl.optim.overflow import OverflowGuard


class HostUnscale:
    """`GradScaler._unscale_grads_` for gradients on the host.

    A scaler on a device copies its scale to the gradients' device without waiting, which is a race when that is the
    host: give it host copies that are complete. For `CPUAdam` nothing is multiplied: the step applies the factor, and
    the check uses the sums that were taken as gradients arrived.

    Args:
        scaler: whose method this replaces.
        guard: finds overflows, and counts them.
        defer: whether the factor may be left to the step: nobody looks at gradients in between.
    """

    def __init__(self, scaler: Any, guard: OverflowGuard, *, defer: bool) -> None:
        self._scaler = scaler
        self._guard = guard
        self._defer = defer

    def __call__(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        """Unscale gradients on the host; see `torch.amp.GradScaler`."""
        host_scale, found = inv_scale.cpu(), found_inf.cpu()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        bad = self._guard.first_bad(parameters)
        if bad is not None:
            self._guard.refuse(bad, expected=True)
        if not (self._defer and isinstance(optimizer, CPUAdam)):
            unscale = type(self._scaler)._unscale_grads_
            result = unscale(self._scaler, optimizer, host_scale, found, allow_fp16)
            torch.autograd.graph.increment_version(gradients(parameters))  # torch's kernel leaves versions as they are
            return result
        # set, not multiplied: the step that would have used the factor of before may have been left out
        optimizer.grad_scale = float(host_scale)
        return {torch.device("cpu"): found.fill_(0.0 if bad is None else 1.0)}
