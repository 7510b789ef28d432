"""Memory that FSDP2 gathers into and reduces from, used again for unit after unit, where the CPU computes.

For each unit FSDP2 asks its collectives for an output, and lets go of it soon. From torch's allocator these blocks come
out of the C library's heap, where they leave holes between what stays. Such a heap grows by more than 64 MiB in every
step, so it is trimmed in every step (`memory/heap.py`), and all pages come back as page faults. From a pool of their
own the same pages serve all units.
"""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_cxl.memory.resource import Buffer, MemoryResource, PoolResource
from lightning_cxl.sharding.torch_private import fsdp_units


class PooledCollective:
    """What FSDP2 calls to gather or to reduce: as before, in memory of a pool."""

    def __init__(self, collective: Any, pool: PoolResource) -> None:
        self._collective = collective
        self._pool = pool

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory of the pool, uninitialised; it goes back when nothing holds the tensor or a view of it."""
        nbytes = torch.Size(size).numel() * dtype.itemsize
        return self._pool.allocate(nbytes).tensor(size, dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gather or reduce."""
        return self._collective(*args, **kwargs)


@contextmanager
def pooled_exchanges(model: nn.Module) -> Iterator[None]:
    """Inside, FSDP2 gathers and reduces a model in memory of a pool, unless somebody has replaced its collectives."""
    pool = PoolResource(_Pages())
    units = [unit for unit in fsdp_units(model) if unit.exchanges_by_default]
    for unit in units:
        unit.exchange_by(PooledCollective(unit.gather, pool), PooledCollective(unit.reduce, pool))
    try:
        yield
    finally:
        for unit in units:
            unit.exchange_by_default(PooledCollective)
        pool.close()


class _Pages(MemoryResource):
    """New pages of this process, which lie where its threads first write them, as torch's own memory does."""

    def allocate(self, nbytes: int, *, alignment: int = mmap.PAGESIZE) -> Buffer:
        # not shared, or a forked child would have the pages, too, and keep them
        own = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages = torch.frombuffer(own, dtype=torch.uint8)
        return Buffer(pages.data_ptr(), nbytes, (), None, pages)  # which keeps them
