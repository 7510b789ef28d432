"""The part of a tensor that this process holds.

[Note: Shards]
With several devices FSDP2 cuts every parameter into one *shard* per process. Users, optimizers and hooks see
DTensors, as with FSDP2 alone: they have the shape of the whole, and norms, clipping and other operations on them are
those of the whole. Kernels, tiers and plans see shards: plain tensors in the memory of this process. `local`
leads from the one to the other, `sharded_like` back. Of a tensor that is not cut both return what they are given, so
one process needs no case of its own.

A version counter is that of the DTensor: operations on it count there, and torch does not count them on the shard.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.distributed.tensor import DTensor

from lightning_cxl import torch_private


def is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor)


def is_replicated(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is cut over the processes of a machine, and each machine holds all of it (HSDP)."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that this process holds of a tensor, as a plain tensor; the tensor itself if it is not cut.

    Of weights that are on the host for a device apart it is that on the host. See [Note: Shards on the host].
    """
    if not isinstance(tensor, DTensor):
        return tensor
    shard: torch.Tensor = tensor._local_tensor
    return getattr(shard, "host", shard)


def settle(tensor: torch.Tensor) -> None:
    """Return when no copy to a device reads the memory that this process holds of a tensor: it may be written then."""
    if isinstance(tensor, DTensor) and (finish := getattr(tensor._local_tensor, "settle", None)) is not None:
        finish()


def sharded_like(shard: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Return `shard` as the part of this process in a tensor that is cut like `owner`; itself if that is not cut."""
    return torch_private.dtensor_like(shard, owner) if isinstance(owner, DTensor) else shard


@torch.no_grad()
def shard_of(value: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Return what of `value` belongs where this process holds its part of `owner`: a view if all have all of it."""
    if not isinstance(owner, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        return value.redistribute(owner.device_mesh, owner.placements)._local_tensor
    if value.shape != owner.shape:
        return value
    for dim, (size, begin) in enumerate(zip(*torch_private.own_part(owner), strict=True)):
        value = value.narrow(dim, min(begin, value.shape[dim]), size)
    return value


def sums_over_processes(tensors: Sequence[torch.Tensor], values: Sequence[float]) -> list[float]:
    """Return numbers that add up to the sum over whole tensors, given one number for what is here of each.

    One collective for each mesh that tensors are cut over. Every process calls it with the same tensors.
    """
    plain: list[float] = []
    of_group: dict[Any, list[float]] = {}
    for tensor, value in zip(tensors, values, strict=True):
        groups = _groups(tensor)
        (of_group.setdefault(groups, []) if groups else plain).append(value)
    return plain + [_reduced(sum(own), groups, torch.float64, ReduceOp.SUM) for groups, own in of_group.items()]


def first_over_processes(tensors: Sequence[torch.Tensor], index: int | None) -> int | None:
    """Return the smallest index that a process gives, on all of them; None where none gives one.

    Every process calls it with the same tensors.
    """
    none = len(tensors)
    groups = {group for tensor in tensors for group in _groups(tensor)}
    first = none if index is None else index
    for group in sorted(groups, key=lambda each: str(each.group_name)):
        first = int(_reduced(first, (group,), torch.int64, ReduceOp.MIN))
    return None if first == none else first


def first_element(tensor: torch.Tensor) -> int:
    """Return which element of the whole, in row-major order, is the first one here; 0 where nothing is cut."""
    if not isinstance(tensor, DTensor) or not tensor.shape:
        return 0
    _, begins = torch_private.own_part(tensor)
    return begins[0] * (tensor.numel() // max(1, tensor.shape[0]))


def _groups(tensor: torch.Tensor) -> tuple[ProcessGroup, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    cuts = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    return tuple(tensor.device_mesh.get_group(dim) for dim in cuts)


def _reduced(value: float, groups: Sequence[ProcessGroup], dtype: torch.dtype, op: Any) -> float:
    number = torch.tensor([value], dtype=dtype)
    for group in groups:
        all_reduce(number, op, group)
    return number.item()
