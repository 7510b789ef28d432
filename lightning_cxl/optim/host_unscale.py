"""A loss scaler on a device, gradients on the host."""

from typing import Any

from torch import Tensor


class HostUnscale:
    """`GradScaler._unscale_grads_` for a scaler on a device and gradients on the host.

    The scaler copies its scale to the gradients' device without waiting, which is a race when that is the host: give it
    host copies that are complete.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def __call__(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        """Unscale gradients on the host; see `torch.amp.GradScaler`."""
        return type(self._scaler)._unscale_grads_(self._scaler, optimizer, inv_scale.cpu(), found_inf.cpu(), allow_fp16)
