import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

from tests import apart


def two_streams():
    """Two streams ask for collectives of one group, the first of them late on one rank only; return who waited."""
    late, soon = torch.Stream(device="apart"), torch.Stream(device="apart")
    mine = torch.full((1,), dist.get_rank() + 1.0, device="apart")
    gathered, summed = torch.empty(2, device="apart"), mine.clone()
    dist.all_reduce(mine.clone())  # the first one connects the ranks, which takes a while
    for stream in (late, soon):
        stream.wait_stream(torch.accelerator.current_stream())
    hosts = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    with contextlib.nullcontext() if dist.get_rank() else apart.paused(late):
        with late:
            work = dist.all_gather_single(gathered, mine, async_op=True)
            is_ahead = not work.is_completed()
            work.wait()
            doubled = gathered * 2
        with soon:
            dist.all_reduce(summed)
        dist.barrier(hosts)
    torch.accelerator.synchronize()
    return is_ahead, doubled.tolist(), summed.tolist()


def test_the_stream_waits_and_not_the_host_whose_order_collectives_of_a_group_keep(ranks):
    assert ranks.of(2, "apart").run(two_streams) == [(True, [2, 4], [3])] * 2
