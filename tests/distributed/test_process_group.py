"""Collectives of the device apart: values, order, and who waits."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests import apart


def here(*values):
    return torch.tensor(values, dtype=torch.float32).to("apart")


def every_collective():
    rank = dist.get_rank()
    mine = here(rank + 1.0, rank + 2.0)
    found = {}
    gathered = torch.empty(4, device="apart")
    dist.all_gather_single(gathered, mine)
    found["all_gather_single"] = gathered
    each = [torch.empty(2, device="apart") for _ in range(2)]
    dist.all_gather(each, mine)
    found["all_gather"] = torch.stack(each)
    part = torch.empty(1, device="apart")
    dist.reduce_scatter_single(part, mine, op=dist.ReduceOp.AVG)
    found["reduce_scatter_single"] = part
    sums = mine.clone()
    dist.all_reduce(sums)
    found["all_reduce"] = sums
    sent = mine.clone()
    dist.broadcast(sent, 1)
    found["broadcast"] = sent
    found["functional"] = functional.all_gather_tensor(mine, 0, dist.group.WORLD) + 0
    found["functional sum"] = functional.all_reduce(mine, "sum", dist.group.WORLD) + 0
    on_host = torch.ones(1) * rank
    dist.all_reduce(on_host)
    found["on the host"] = on_host
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    dist.barrier()
    return {name: value.tolist() for name, value in found.items()}, objects


def test_every_collective_gives_what_gloo_gives(ranks):
    for rank, (found, objects) in enumerate(ranks.of(2, "apart").run(every_collective)):
        assert objects == [{"rank": 0}, {"rank": 1}]
        assert found == {
            "all_gather_single": [1, 2, 2, 3],
            "all_gather": [[1, 2], [2, 3]],
            "reduce_scatter_single": [[1.5], [2.5]][rank],
            "all_reduce": [3, 5],
            "broadcast": [2, 3],
            "functional": [1, 2, 2, 3],
            "functional sum": [3, 5],
            "on the host": [1],
        }


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
