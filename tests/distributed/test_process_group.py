import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests import apart


def every_collective(device):
    rank = dist.get_rank()
    mine = torch.tensor([rank + 1.0, rank + 2.0]).to(device)
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


def two_streams():
    """Two streams ask for collectives of one group, the first of them late on one rank only; return who waited."""
    late, soon = torch.Stream(device="apart"), torch.Stream(device="apart")
    mine = torch.full((1,), dist.get_rank() + 1.0, device="apart")
    gathered, summed = torch.empty(2, device="apart"), mine.clone()
    for stream in (late, soon):
        stream.wait_stream(torch.accelerator.current_stream())
    if dist.get_rank() == 0:
        apart.set_delay(kernel=0.1)
        with late:
            mine.mul_(1)
        apart.set_delay()
    with late:
        work = dist.all_gather_single(gathered, mine, async_op=True)
        is_ahead = not work.is_completed()
        work.wait()
        doubled = gathered * 2
    with soon:
        dist.all_reduce(summed)
    torch.accelerator.synchronize()
    return is_ahead, doubled.tolist(), summed.tolist()


def test_the_stream_waits_and_not_the_host_whose_order_collectives_of_a_group_keep(ranks):
    assert ranks.of(2, "apart").run(two_streams) == [(True, [2, 4], [3])] * 2
