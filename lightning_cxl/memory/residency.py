"""Where a tensor's bytes really are, asked from the kernel."""

from collections.abc import Iterator
from itertools import product

import torch

from lightning_cxl.errors import PlacementError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.numa import PageNodes
from lightning_cxl.memory.stacks import HostMemory
from lightning_cxl.native._numa import NOWHERE, page_nodes

UNBACKED = "unbacked"
"""Key of bytes that no page backs yet: memory that was never written."""


def residency(
    tensor: torch.Tensor, topology: Topology, memory: HostMemory | None = None, *, where: PageNodes = page_nodes
) -> dict[str, int]:
    """Return how many of a tensor's bytes each tier holds now; they sum to its elements' size.

    A page counts for the tier that has its node; where `memory` handed the bytes out for an emulated tier on that node,
    for that one. Bytes that no page backs yet have the key ``"unbacked"``, a tensor elsewhere its device's name.

    Args:
        tensor: any strided tensor; of a view only the elements it shows are counted.
        topology: maps nodes to tiers.
        memory: knows which tier its buffers were asked from.
        where: asks where pages are.

    Raises:
        PlacementError: the kernel refuses to say.
        ValueError: the tensor has no strided storage.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"only a strided tensor has addresses, this one has layout {tensor.layout}")
    if tensor.device.type != "cpu":
        return {str(tensor.device): tensor.numel() * tensor.element_size()} if tensor.numel() else {}
    found: dict[str, int] = {}
    for begin, length in _runs(tensor):
        address = begin
        for asked, nbytes in memory.tiers_of(begin, length) if memory is not None else ((None, length),):
            for node, size in _ask(where, address, nbytes).items():
                if node == NOWHERE:
                    name = UNBACKED
                elif asked is not None and node in asked.node_ids:
                    name = asked.name
                else:
                    tier = topology.node_tier(node)
                    name = tier.name if tier is not None else f"node {node}"
                found[name] = found.get(name, 0) + size
            address += nbytes
    return found


def _ask(where: PageNodes, address: int, nbytes: int) -> dict[int, int]:
    try:
        return where(address, nbytes)
    except OSError as error:
        raise PlacementError(
            f"the kernel refuses to say where pages are ({error}). In a container allow the system call move_pages."
        ) from error


def _runs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield (address, nbytes) of contiguous runs that together are a tensor's elements."""
    if tensor.numel() == 0:
        return
    itemsize = tensor.element_size()
    run = itemsize
    outer: list[tuple[int, int]] = []  # (size, stride in bytes)
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size == 1:
            continue
        if stride * itemsize == run and not outer:
            run *= size
        else:
            outer.append((size, stride * itemsize))
    for offsets in product(*(range(0, size * stride, stride) if stride else [0] * size for size, stride in outer)):
        yield tensor.data_ptr() + sum(offsets), run
