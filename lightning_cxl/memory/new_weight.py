"""`new_weight`: memory for a weight that was not made when its module was."""

import torch

from lightning_cxl.memory import scope
from lightning_cxl.memory.hook import HostAllocationMode, is_placing
from lightning_cxl.placement.decorators import TierSpec, constructing
from lightning_cxl.placement.placement import TensorRole


def new_weight(like: torch.Tensor, dtype: torch.dtype, spec: TierSpec | None) -> torch.Tensor:
    """Return uninitialised memory with the shape and strides of a tensor on the meta device.

    Inside a run, or where `host_allocation` is active, it lies where that says; elsewhere it is ordinary memory. On
    torch's default device, so that weights of a model that is built on a GPU come into being there.

    Args:
        like: what the module has now.
        dtype: of the weight.
        spec: what decorators ask for the module.

    Raises:
        TierFullError: it fits nowhere.
        TierNotFoundError: `spec` names a tier that does not exist.
    """
    device = torch.get_default_device()
    used = scope.active()
    with constructing(spec):
        if used is None or is_placing() or device.type != "cpu":
            return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)
        with HostAllocationMode(used.memory, used.placer, role=TensorRole.COMPUTE_WEIGHTS):
            return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device)
