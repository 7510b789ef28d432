"""Host tensors that mirror a parameter: same shape and memory layout, on memory of ours."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.nn.parameter import is_lazy

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import NOWHERE, page_nodes

FlatAllocate = Callable[[int, torch.dtype], torch.Tensor]
"""Returns an uninitialised 1-D host tensor of that many elements."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether `tensor` covers its memory without gaps or overlaps, in any dimension order.

    A transposed or channels-last tensor is dense; an expanded one, or every second row of another, is not.
    """
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def laid_out_as(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return dense memory as a tensor of `parameter`'s shape: its element order where that is dense, else row-major."""
    if is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.as_strided((parameter.numel(),), (1,)).view(parameter.shape)


def mirror(tensor: torch.Tensor, dtype: torch.dtype, allocate: FlatAllocate) -> torch.Tensor:
    """Return an uninitialised host tensor of `tensor`'s shape, with its strides where it is dense.

    Equal strides make element i of the flat memory the same element in every mirror, which is what a flat kernel needs.
    """
    return laid_out_as(allocate(tensor.numel(), dtype), tensor)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory of this host that has an address."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not is_lazy(tensor)


def storage_extent(tensor: torch.Tensor) -> int:
    """Return how many elements lie from the first to the last one that a non-empty strided tensor touches."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@torch.no_grad()
def copy_bytes(source: Buffer, destination: Buffer) -> None:
    into = destination.tensor((source.nbytes,), torch.uint8)
    into.copy_(source.tensor((source.nbytes,), torch.uint8))


# ----------------------------------------------------------------------------------------------------
# `anonymous_bytes`: what tensors in ordinary memory hold that is free again without them, by node.


def anonymous_bytes(tensors: Iterable[torch.Tensor], default_node: int) -> dict[int, int]:
    """Return bytes by node id. Untouched memory has no pages, and pages of mapped files count as free already.

    Args:
        tensors: those that share memory count once; others than ordinary host tensors are left out.
        default_node: where memory is taken to be if the kernel refuses to say.
    """
    files = _mapped_files()
    found: dict[int, int] = {}
    seen = set()
    for tensor in tensors:
        if not is_ordinary(tensor) or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        index = bisect_right(files, (address, 1 << 64)) - 1
        in_file = index >= 0 and address < files[index][1]
        if address in seen or in_file:
            continue
        seen.add(address)
        try:
            nodes = page_nodes(address, nbytes)
        except OSError:
            nodes = {default_node: nbytes}
        for node, size in nodes.items():
            if node != NOWHERE:
                found[node] = found.get(node, 0) + size
    return found


def _mapped_files() -> list[tuple[int, int]]:
    """Return the address ranges of this process that files back, sorted."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        if inode != "0":
            begin, end = addresses.split("-")
            ranges.append((int(begin, 16), int(end, 16)))
    return sorted(ranges)
