"""`measure_gather`: which way weights come together faster on this very machine, from a few gathers of a few MiB.

Both ways are run as training runs them, by all ranks at once and in turns, so that what they share (links, memory,
cores) is shared here, too. Sharing is tried with real segments, so a machine that does not let ranks share memory is
found here, whatever its name says.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lightning_cxl.memory.shared import BackFile, SharedSegment
from lightning_cxl.sharding.agreement import on_all_ranks
from lightning_cxl.sharding.segments import PageLock, Segments
from lightning_cxl.sharding.share_choice import GatherSeconds
from lightning_cxl.sharding.torch_private import all_gather
from lightning_cxl.transfer.engine import TransferEngine

_ROUNDS = 5
_UNIT_BYTES = 16 * 2**20


def measure_gather(
    back: BackFile,
    group: Any,
    engine: TransferEngine,
    *,
    nbytes: int = _UNIT_BYTES,
    page_lock: PageLock | None = None,
) -> GatherSeconds:
    """Return the seconds of the slowest rank, medians of rounds; equal on all ranks, which all call this.

    Args:
        group: over which weights are sharded; all of its ranks run on this machine.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    numel = max(1, nbytes // ranks // 4)

    def make() -> list[SharedSegment]:
        segment = SharedSegment(4 * numel, back)
        parts.append(segment.allocate(4 * numel).tensor((numel,), torch.float32).fill_(rank))
        return [segment]

    parts: list[torch.Tensor] = []
    segments = Segments(make, group, page_lock)
    try:
        own = parts[0]
        at = own.data_ptr() - segments.own[0].address
        others = {
            other: segment.part(at, own.nbytes).tensor((numel,), torch.float32)
            for other, (segment,) in segments.others.items()
        }
        output = torch.empty(ranks * numel, device=engine.device)
        mine = output.narrow(0, rank * numel, numel)

        def by_shared_memory() -> None:
            for other, part in ((rank, own), *others.items()):
                engine.h2d(part, output.narrow(0, other * numel, numel)).wait()

        def by_peers() -> None:
            engine.h2d(own, mine).wait()
            all_gather(output, mine, group)

        def timed(run: Callable[[], None]) -> float:
            dist.barrier(group)
            begin = time.perf_counter()
            run()
            engine.mark().wait_host()
            return time.perf_counter() - begin

        for run in (by_shared_memory, by_peers):
            timed(run)  # connections are made, pages are mapped
        rounds = [(timed(by_shared_memory), timed(by_peers)) for _ in range(_ROUNDS)]
        everybody = on_all_ranks(lambda: rounds, group)
    finally:
        segments.close()
    slowest = [[max(times) for times in zip(*ways, strict=True)] for ways in zip(*everybody, strict=True)]
    shared, peers = (statistics.median(times) for times in zip(*slowest, strict=True))
    return GatherSeconds(4 * numel * ranks, shared, peers)
