"""What the package uses of FSDP2 that torch does not promise to keep; see `torch_private.py`.

Names are looked up when a model with sharded modules is looked at: importing FSDP2 takes a while.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_cxl.torch_private import find

_FSDP = "torch.distributed.fsdp._fully_shard"


class FsdpUnit:
    """What one `FSDPModule` gathers as one: its sharded parameters, and how they are gathered.

    Args:
        module: to which ``fully_shard`` has been applied.
    """

    def __init__(self, module: Any) -> None:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11 has one at most
            groups = [group] if (group := state._fsdp_param_group) is not None else []
        self.module = module
        self.num_groups = len(groups)
        """0 where all parameters are those of other units; more than one where they are sharded in different ways."""
        self._group = groups[0] if groups else None

    @property
    def shards(self) -> list[Any]:
        """What stands for each sharded parameter in FSDP2, in the order in which they are gathered."""
        return list(self._group.fsdp_params) if self._group is not None else []

    @property
    def process_group(self) -> Any:
        """The group that the parameters are sharded over; not that of a smaller mesh after a forward."""
        assert self._group is not None
        return self._group.mesh_info.shard_process_group

    @property
    def gather(self) -> Any:
        """What gathers the parameters now."""
        assert self._group is not None
        return self._group._all_gather_comm


def fsdp_units(model: nn.Module) -> list[FsdpUnit]:
    """Return all modules inside a model to which ``fully_shard`` has been applied, and that gather something.

    Raises:
        UnsupportedError: this torch lacks what is needed to put their shards elsewhere.
    """
    kind = find("torch.distributed.fsdp", "FSDPModule", "find sharded modules")
    for name in ("_get_fsdp_state", "set_custom_all_gather"):
        find("torch.distributed.fsdp", f"FSDPModule.{name}", "replace the gather of sharded modules")
    for name in ("_sharded_local_tensor", "reset_sharded_param"):
        find(f"{_FSDP}._fsdp_param", f"FSDPParam.{name}", "put shards where other processes can read them")
    units = [FsdpUnit(module) for module in model.modules() if isinstance(module, kind)]
    return [unit for unit in units if unit.num_groups]


def flat_shard(shard: Any) -> Tensor:
    """Return the bytes of a sharded parameter on this rank, padded and flat, as they are gathered."""
    flat: Tensor = shard._sharded_param_data
    return flat


def gathered_dtype(shard: Any) -> torch.dtype:
    """Return the dtype in which a sharded parameter is gathered; known from the first gather on."""
    dtype: torch.dtype = shard.param_dtype or shard.orig_dtype
    return dtype


def move_shard(shard: Any, flat: Tensor) -> None:
    """Let a sharded parameter lie in other memory: the parameter stays the object that it is.

    Args:
        shard: of `FsdpUnit.shards`.
        flat: holds what `flat_shard` holds, the same size and dtype.
    """
    local = shard.sharded_param._local_tensor
    padded = flat.view(shard.padded_sharded_param_size)
    with torch.no_grad():
        shard.sharded_param._local_tensor = padded.as_strided(local.size(), local.stride())
    shard._sharded_param_data = flat


def shard_name(shard: Any) -> str:
    """Return the name of a sharded parameter; that in its module before the first forward."""
    return str(shard._param_fqn or shard._module_info.param_name)


def all_gather(output: Tensor, part: Tensor, group: Any) -> None:
    """Gather equal parts of all ranks one after the other, as FSDP2 does by itself; a device may still be at it."""
    find(f"{_FSDP}._fsdp_collectives", "DefaultAllGather", "compare gathers with shared memory")()(output, part, group)
