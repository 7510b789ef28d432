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

from lightning_cxl.machine.gathers import GatherSeconds
from lightning_cxl.memory.numa import PageSource
from lightning_cxl.memory.shared import SharedSegment
from lightning_cxl.sharding.agreement import on_all_ranks
from lightning_cxl.sharding.segments import PageLock, Segments
from lightning_cxl.sharding.torch_private import all_gather

_ROUNDS = 5
_UNIT_BYTES = 16 * 2**20


def measure_gather(
    source: PageSource,
    group: Any,
    *,
    host_group: Any = None,
    device: torch.device | str = "cpu",
    nbytes: int = _UNIT_BYTES,
    page_lock: PageLock | None = None,
    finish: Callable[[], None] = lambda: None,
) -> GatherSeconds:
    """Return the seconds of the slowest rank, medians of rounds; equal on all ranks, which all call this.

    Args:
        source: the tier on which weights lie.
        group: over which weights are sharded; all of its ranks run on this machine.
        host_group: a group of the same ranks that exchanges objects of the host; None: `group`.
        device: what computes.
        nbytes: of the unit that is gathered.
        page_lock: of that device.
        finish: waits until the device has done all it was told.

    Raises:
        UnsupportedError: ranks cannot map each other's memory.
        TierFullError: no room for `nbytes` divided by the ranks on the tier of one rank.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    host_group = group if host_group is None else host_group
    numel = max(1, nbytes // ranks // 4)

    def make() -> SharedSegment:
        segment = SharedSegment(4 * numel, source)
        parts.append(segment.allocate(4 * numel).tensor((numel,), torch.float32).fill_(rank))
        return segment

    parts: list[torch.Tensor] = []
    segments = Segments(make, host_group, page_lock)
    own = parts[0]
    at = own.data_ptr() - segments.own.address
    others = {
        other: segment.part(at, own.nbytes).tensor((numel,), torch.float32)
        for other, segment in segments.others.items()
    }
    output = torch.empty(ranks * numel, device=device)
    mine = output.narrow(0, rank * numel, numel)

    def by_shared_memory() -> None:
        mine.copy_(own, non_blocking=True)
        for other, part in others.items():
            output.narrow(0, other * numel, numel).copy_(part, non_blocking=True)

    def by_peers() -> None:
        mine.copy_(own, non_blocking=True)
        all_gather(output, mine, group)

    def timed(run: Callable[[], None]) -> float:
        dist.barrier(host_group)
        begin = time.perf_counter()
        run()
        finish()
        return time.perf_counter() - begin

    for run in (by_shared_memory, by_peers):
        timed(run)  # connections are made, pages are mapped
    rounds = [(timed(by_shared_memory), timed(by_peers)) for _ in range(_ROUNDS)]
    everybody = on_all_ranks(lambda: rounds, host_group)
    segments.close()
    slowest = [[max(times) for times in zip(*ways, strict=True)] for ways in zip(*everybody, strict=True)]
    shared, peers = (statistics.median(times) for times in zip(*slowest, strict=True))
    return GatherSeconds(4 * numel * ranks, shared, peers, "measured")
