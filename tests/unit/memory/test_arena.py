import pytest
import torch

from lightning_cxl.errors import TierFullError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.numa import Budget, BudgetResource, NumaResource, StripedResource
from lightning_cxl.memory.pool import ArenaResource
from lightning_cxl.native._numa import NOWHERE, page_nodes

MIB = 2**20
TOPOLOGY = Topology.fake(dram=("64GiB",), cxl=())


def make(limit: int = 256 * MIB, free: int = 2**40, step: int = 8 * MIB) -> tuple[ArenaResource, Budget]:
    budget = Budget("dram", limit)
    leaf = NumaResource("dram", 0, TOPOLOGY, free_bytes=lambda: free)
    return ArenaResource(BudgetResource(leaf, budget), 1024 * MIB, step_bytes=step), budget


def test_a_range_is_backed_only_as_far_as_it_was_used() -> None:
    arena, budget = make()
    assert budget.held_bytes == 0

    buffer = arena.allocate(3 * MIB)
    assert budget.held_bytes == 4 * MIB
    assert page_nodes(buffer.address, 12 * MIB) == {0: 4 * MIB, NOWHERE: 8 * MIB}


def test_a_range_grows_by_a_quarter_until_that_is_a_step() -> None:
    arena, budget = make()
    held, kept = [], []
    for _ in range(44):
        kept.append(arena.allocate(MIB))
        held.append(budget.held_bytes // MIB)
    assert sorted(set(held)) == [2, 4, 6, 8, 12, 16, 18, 24, 32, 40, 48]


def test_growth_never_moves_a_tensor_and_the_lowest_gap_is_used_first() -> None:
    arena, _ = make()
    first = arena.allocate(5 * MIB)
    tensor = first.tensor((100,), torch.float32).fill_(1.0)
    second = arena.allocate(50 * MIB)
    third = arena.allocate(5 * MIB)
    start = first.address
    assert (second.address, third.address) == (start + 5 * MIB, start + 55 * MIB)

    del second
    assert arena.allocate(4 * MIB).address == start + 5 * MIB
    assert arena.allocate(60 * MIB).address == start + 60 * MIB
    assert tensor.tolist() == [1.0] * 100


def test_the_tail_goes_back_after_some_steps_that_needed_less() -> None:
    arena, budget = make()
    arena.allocate(100 * MIB)
    arena.end_step()
    held = []
    for _ in range(6):
        small = arena.allocate(10 * MIB)
        del small
        arena.end_step()
        held.append(budget.held_bytes // MIB)

    assert held == [104, 104, 104, 16, 16, 16]
    assert arena.allocate(100 * MIB).nbytes == 100 * MIB


def test_steps_that_need_about_the_same_keep_their_pages() -> None:
    arena, budget = make()
    for size in (100, 90, 80, 95, 78, 85, 90, 80):
        arena.allocate(size * MIB)
        arena.end_step()

    assert budget.held_bytes == 104 * MIB


def test_living_buffers_are_never_given_back() -> None:
    arena, budget = make()
    bottom = arena.allocate(60 * MIB)
    top = arena.allocate(4 * MIB)
    view = top.tensor((MIB,), torch.float32).fill_(7.0)
    del bottom
    for _ in range(8):
        arena.end_step()
    arena.trim()

    assert budget.held_bytes == 64 * MIB
    assert bool((view == 7.0).all())
    del view, top
    arena.trim()
    assert budget.held_bytes == 0


def test_a_budget_is_used_to_its_last_page_and_never_exceeded() -> None:
    arena, budget = make(limit=10 * MIB + 4096)
    kept = [arena.allocate(MIB) for _ in range(10)]
    kept.append(arena.allocate(4096))
    assert budget.held_bytes == 10 * MIB + 4096

    with pytest.raises(TierFullError, match="tier `dram`"):
        arena.allocate(1)
    kept.pop(0)
    assert arena.allocate(MIB).nbytes == MIB


def test_a_node_without_room_leaves_the_arena_as_it_was() -> None:
    arena, budget = make(free=16 * MIB)
    kept = arena.allocate(16 * MIB)

    with pytest.raises(TierFullError, match="node 0"):
        arena.allocate(20 * MIB)
    assert budget.held_bytes == 16 * MIB
    assert arena.usage() == (16 * MIB, 16 * MIB)
    assert page_nodes(kept.address, 32 * MIB) == {0: 16 * MIB, NOWHERE: 16 * MIB}


def test_closing_keeps_living_buffers_and_gives_the_rest_back() -> None:
    arena, budget = make()
    low, high = arena.allocate(10 * MIB), arena.allocate(30 * MIB)
    arena.close()
    assert budget.held_bytes == 40 * MIB

    del high
    assert budget.held_bytes == 10 * MIB
    del low
    assert budget.held_bytes == 0


def test_spans_of_a_striped_arena_follow_growth_and_shrinking() -> None:
    class Label(NumaResource):
        def back(self, mapping, parts):
            return tuple(type(s)(s.tier, self.label, s.offset, s.nbytes) for s in super().back(mapping, parts))

    leaves = [Label("dram", 0, TOPOLOGY) for _ in range(2)]
    leaves[0].label, leaves[1].label = 1, 2
    arena = ArenaResource(StripedResource([(leaf, 1.0) for leaf in leaves]), 2**30, step_bytes=8 * MIB)
    for _ in range(2):
        buffer = arena.allocate(13 * MIB)
        assert [(s.node_id, s.offset, s.nbytes) for s in buffer.spans] == [
            (1 + i % 2, 2 * i * MIB, min(2, 13 - 2 * i) * MIB) for i in range(7)
        ]
        del buffer
        arena.trim()
