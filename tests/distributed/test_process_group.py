"""Collectives of the device apart: values, order, and who waits."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests import apart


def here(*values, device="apart"):
    return torch.tensor(values, dtype=torch.float32).to(device)


def every_collective(device):
    rank = dist.get_rank()
    mine = here(rank + 1.0, rank + 2.0, device=device)
    gathered, part = torch.empty(4, device=device), torch.empty(1, device=device)
    each, sums, sent = [torch.empty(2, device=device) for _ in range(2)], mine.clone(), mine.clone()
    dist.all_gather_single(gathered, mine)
    dist.all_gather(each, mine)
    dist.reduce_scatter_single(part, mine, op=dist.ReduceOp.AVG)
    dist.all_reduce(sums)
    dist.broadcast(sent, 1)
    functions = (
        functional.all_gather_tensor(mine, 0, dist.group.WORLD) + 0,
        functional.all_reduce(mine, "sum", dist.group.WORLD) + 0,
    )
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    return [value.tolist() for value in (gathered, *each, part, sums, sent, *functions)], objects


def test_every_collective_gives_what_gloo_gives(ranks):
    expected = ranks.of(2).run(every_collective, "cpu")
    assert ranks.of(2, "apart").run(every_collective, "apart") == expected
    assert ranks.of(2, "apart").run(every_collective, "cpu") == expected, "of tensors on the host"


def waits():
    """The host goes on while a kernel before the collective is late, and the current stream does not overtake it."""
    apart.set_delay(kernel=0.05)
    mine = torch.full((2,), dist.get_rank() + 1.0, device="apart")
    gathered = torch.empty(4, device="apart")
    work = dist.all_gather_single(gathered, mine, async_op=True)
    ahead = not work.is_completed()
    work.wait()
    return ahead, (gathered * 2).tolist()


def test_the_stream_waits_and_not_the_host(ranks):
    assert ranks.of(2, "apart").run(waits) == [(True, [2, 2, 4, 4])] * 2


def two_streams():
    """Streams that ask for collectives of one group, the first of them late on one rank only."""
    late, soon = torch.Stream(device="apart"), torch.Stream(device="apart")
    mine = here(dist.get_rank() + 1.0)
    gathered, summed = torch.empty(2, device="apart"), mine.clone()
    for stream in (late, soon):
        stream.wait_stream(torch.accelerator.current_stream())
    if dist.get_rank() == 0:
        apart.set_delay(kernel=0.1)
        with late:
            mine.mul_(1)
        apart.set_delay()
    with late:
        dist.all_gather_single(gathered, mine)
    with soon:
        dist.all_reduce(summed)
    torch.accelerator.synchronize()
    return gathered.tolist(), summed.tolist()


def test_collectives_of_one_group_keep_the_order_of_the_host(ranks):
    assert ranks.of(2, "apart").run(two_streams) == [([1, 2], [3])] * 2
