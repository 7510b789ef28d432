"""What the package uses of FSDP2 that torch does not promise to keep. See `lightning_cxl/torch_private.py`."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule


def fsdp_params(module: FSDPModule) -> list[Any]:
    """Return what FSDP2 keeps of each parameter that it gathers for this module itself, not for modules inside."""
    state: Any = module._get_fsdp_state()
    return [each for group in state._fsdp_param_groups for each in group.fsdp_params]


def give_shard(fsdp_param: Any, padded: Tensor) -> None:
    """Let FSDP2 keep a shard in other memory, which has its values already.

    Args:
        fsdp_param: one of `fsdp_params`.
        padded: contiguous, shaped as `padded_size` says. The shard is what comes first in it.
    """
    dim = fsdp_param.fsdp_placement.dim
    own = fsdp_param.sharded_param._local_tensor
    length = own.size(dim) if own.numel() else 0
    fsdp_param._sharded_param_data = padded.view(-1)
    fsdp_param.sharded_param._local_tensor = padded.narrow(dim, 0, length)


def padded_size(fsdp_param: Any) -> torch.Size:
    """Return the shape of the memory of a shard: equal on all processes, larger than the shard on the last ones."""
    size: torch.Size = fsdp_param.padded_sharded_param_size
    return size
