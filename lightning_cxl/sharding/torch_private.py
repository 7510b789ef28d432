"""What the package uses of FSDP2 that torch does not promise to keep. See `lightning_cxl/torch_private.py`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_cxl.torch_private import find

make_wrapper = find("torch", "Tensor._make_wrapper_subclass", "show FSDP2 shards that lie on the host")
no_torch_function = find("torch", "_C._disabled_torch_function_impl", "see operators on shards behind autograd")
to_copy = find("torch", "ops.aten._to_copy.default", "copy shards on the host to the host")


def written_by(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the arguments that a call of an operator writes to; None if its kind never writes."""
    if not operator._schema.is_mutable:
        return None
    arguments = operator._schema.arguments
    given = [*zip(arguments, args, strict=False), *((each, kwargs.get(each.name)) for each in arguments)]
    return [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]


def sharded_parameters(model: nn.Module) -> Iterator[Any]:
    """Yield what FSDP2 knows of each parameter that it manages in a model, one for tied ones; see `put_shard`."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for group in state._fsdp_param_groups:
                yield from group.fsdp_params


def put_shard(managed: Any, shard: Tensor, memory: Tensor) -> None:
    """Put `shard` in the place of the local part of a parameter, before the first forward of the model.

    Args:
        managed: of `sharded_parameters`.
        shard: of the same shape and dtype, and of the same device unless the parameter is on the meta device.
        memory: of the same storage; FSDP2 takes a parameter with the storage that it knows for unchanged, and does not
            pad it, which would move it to other memory.
    """
    parameter = managed.sharded_param
    if parameter.is_meta:  # the parameter itself says which device it is on
        there = nn.Parameter(managed.to_sharded_dtensor(shard), requires_grad=parameter.requires_grad)
        there.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, there)  # type: ignore[no-untyped-call]
    else:
        parameter._local_tensor = shard
    managed._sharded_param_data = memory.view(-1)


def give_shard(fsdp_param: Any, padded: Tensor) -> None:
    """Let FSDP2 keep a shard in other memory, which has its values already.

    Args:
        fsdp_param: of `sharded_parameters`.
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
