import random
from collections.abc import Sequence

import pytest

from lightning_cxl.errors import TierFullError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.resource import (
    Budget,
    BudgetResource,
    Buffer,
    MemoryResource,
    NumaResource,
    PoolResource,
    Span,
)
from lightning_cxl.native._numa import Mapping

MIB = 2**20


class Tally(NumaResource):
    """A leaf that notes the sizes asked for; refuses the sizes in `refused`."""

    def __init__(self) -> None:
        super().__init__("dram", 0, Topology.fake(dram=("1GiB",), cxl=()))
        self.sizes: list[int] = []
        self.refused: set[int] = set()

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        ((_, nbytes),) = parts
        if nbytes in self.refused:
            raise TierFullError("no")
        self.sizes.append(nbytes)
        return super().back(mapping, parts)


def budgeted(limit: int) -> tuple[MemoryResource, Budget]:
    budget = Budget("dram", limit)
    return BudgetResource(Tally(), budget), budget


def test_small_requests_share_a_slab_and_large_ones_get_their_own() -> None:
    upstream = Tally()
    pool = PoolResource(upstream, slab_bytes=4 * MIB)
    kept = [pool.allocate(size) for size in (100, 200_000, 300_000, MIB, 3 * MIB + 5)]

    assert upstream.sizes == [4 * MIB, MIB, 3 * MIB + 4096]
    assert pool.usage() == (sum(b.nbytes for b in kept), 8 * MIB + 4096)


def test_what_large_buffers_leave_behind_serves_any_size_that_fits() -> None:
    upstream = Tally()
    pool = PoolResource(upstream, slab_bytes=MIB)
    address = pool.allocate(8 * MIB).address

    first, second = pool.allocate(3 * MIB), pool.allocate(5 * MIB)
    assert {first.address, second.address} == {address, address + 3 * MIB}
    assert upstream.sizes == [8 * MIB]
    del first, second
    assert pool.allocate(8 * MIB).address == address  # the parts are one again
    assert upstream.sizes == [8 * MIB]


@pytest.mark.parametrize("seed", range(12))
def test_lengths_that_change_beside_gradients_settle(seed: int) -> None:
    """Gradients, whose sizes do not change, come while inputs go, and live on in turns of a few units."""
    draw = random.Random(seed)
    upstream = Tally()
    pool = PoolResource(upstream, slab_bytes=MIB // 16)
    depth, live = draw.randint(2, 12), draw.randint(1, 3)
    gradients = [draw.randint(4, 40) * 4096 for _ in range(draw.randint(1, 4))]
    lengths = [draw.randint(4, 30) for _ in range(8)]
    peak = 0

    def step(length: int) -> int:
        before, most = len(upstream.sizes), 0
        inputs = [pool.allocate(length * 4096 - 64) for _ in range(depth)]
        updating: list[list[Buffer]] = []
        while inputs:
            updating.append([pool.allocate(nbytes) for nbytes in gradients])
            most = max(most, pool.usage()[0])
            inputs.pop()
            del updating[: max(0, len(updating) - live)]
        nonlocal peak
        peak = max(peak, most)
        return len(upstream.sizes) - before

    taken = [sum(step(length) for length in lengths) for _ in range(5)]
    assert taken[3:] == [0, 0]
    assert pool.usage()[1] <= 1.5 * peak + MIB // 16


def test_free_slabs_do_not_pile_up_beyond_the_peak() -> None:
    pool = PoolResource(Tally(), slab_bytes=MIB)
    for size in range(1, 40):  # every size is new, so nothing can be reused
        pool.allocate(size * 5 * MIB // 4 + 4096)

    used, held = pool.usage()
    assert used == 0
    assert held <= 1.125 * (39 * 5 * MIB // 4 + 4096) + MIB


def test_a_full_upstream_makes_the_pool_give_free_slabs_back_first() -> None:
    upstream, budget = budgeted(20 * MIB)
    pool = PoolResource(upstream, slab_bytes=MIB)
    pool.allocate(12 * MIB)
    assert budget.held_bytes == 12 * MIB

    kept = pool.allocate(16 * MIB)
    assert budget.held_bytes == 16 * MIB
    with pytest.raises(TierFullError, match=r"4\.0 MiB of 20\.0 MiB free"):
        pool.allocate(5 * MIB)
    assert pool.usage() == (kept.nbytes, 16 * MIB)


def test_a_full_upstream_gets_free_slabs_that_the_pool_would_have_kept() -> None:
    """Below its peak of use the pool keeps more than the budget has room for beside the new slab."""
    upstream, budget = budgeted(20 * MIB)
    pool = PoolResource(upstream, slab_bytes=MIB)
    both = [pool.allocate(9 * MIB), pool.allocate(9 * MIB)]
    both.clear()
    assert budget.held_bytes == 18 * MIB

    kept = pool.allocate(12 * MIB)
    assert budget.held_bytes == kept.nbytes == 12 * MIB


def test_the_end_of_a_budget_smaller_than_a_slab_is_usable() -> None:
    upstream, budget = budgeted(10 * 4096)
    pool = PoolResource(upstream, slab_bytes=16 * MIB)
    kept = [pool.allocate(4096) for _ in range(10)]

    assert budget.held_bytes == 10 * 4096
    with pytest.raises(TierFullError):
        pool.allocate(1)
    del kept
    assert pool.allocate(1).nbytes == 1
