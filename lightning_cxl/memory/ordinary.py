"""`anonymous_bytes`: what tensors in ordinary memory hold that is free again without them, by node."""

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path

import torch

from lightning_cxl.memory.host_tensors import is_ordinary
from lightning_cxl.native._numa import NOWHERE, page_nodes


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
