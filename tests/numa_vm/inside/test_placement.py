import random

import pytest

from lightning_cxl.memory.host_memory import HostMemory
from lightning_cxl.memory.placement import Placement, TensorRole
from lightning_cxl.native._numa import page_nodes
from tests.numa_vm.inside.located import STRIPE_BYTES, bytes_by_tier, check_placement, check_spans

MIB = 1 << 20
MOMENTUM = TensorRole.MOMENTUM


@pytest.fixture
def memory(topology):
    memory = HostMemory(topology, on_tier_full="error")
    yield memory
    memory.close()


@pytest.mark.parametrize("tier", ["dram", "cxl"])
@pytest.mark.parametrize("nbytes", [1, 4096, 5 * MIB + 1, 64 * MIB])
def test_one_tier_holds_all_of_a_buffer(memory, topology, tier, nbytes):
    buffer = memory.allocate(nbytes, Placement((tier,)), MOMENTUM)
    check_spans(buffer)
    assert bytes_by_tier(buffer, topology) == {tier: nbytes}


def test_cards_share_a_buffer_equally(memory, cards):
    buffer = memory.allocate(64 * MIB, Placement(("cxl",)), MOMENTUM)
    assert page_nodes(buffer.address, buffer.nbytes) == {node: 64 * MIB // len(cards) for node in cards}
    if len(cards) > 1:
        first = [page_nodes(buffer.address + at, STRIPE_BYTES) for at in (0, STRIPE_BYTES)]
        assert sorted(next(iter(nodes)) for nodes in first) == list(cards), "stripe by stripe, not half by half"


@pytest.mark.parametrize("shares", [(0.75, 0.25), (0.5, 0.5), (0.1, 0.9)])
def test_shares_split_a_buffer_between_tiers(memory, topology, shares):
    placement = Placement(("dram", "cxl"), shares=shares)
    buffer = memory.allocate(80 * MIB, placement, MOMENTUM)
    check_spans(buffer)
    check_placement(buffer, placement, topology)
    assert set(bytes_by_tier(buffer, topology)) == {"dram", "cxl"}


@pytest.mark.parametrize("tier", ["dram", "cxl"])
def test_small_requests_come_from_slabs_of_their_tier(memory, topology, tier):
    sizes = random.Random(0)
    living = []
    for _ in range(300):
        living.append(memory.allocate(sizes.randrange(1, 200_000), Placement((tier,)), MOMENTUM))
        if len(living) > 100:
            living.pop(sizes.randrange(100))
    for buffer in living:
        check_spans(buffer)
        assert bytes_by_tier(buffer, topology) == {tier: buffer.nbytes}


def test_small_requests_share_tiers_together(memory, topology):
    sizes = random.Random(1)
    placement = Placement(("dram", "cxl"), shares=(0.75, 0.25))
    living = [memory.allocate(sizes.randrange(1, 1_000_000), placement, MOMENTUM) for _ in range(100)]
    total = {"dram": 0, "cxl": 0}
    for buffer in living:
        check_spans(buffer)
        for tier, nbytes in bytes_by_tier(buffer, topology).items():
            total[tier] += nbytes
    assert abs(total["cxl"] - 0.25 * sum(total.values())) <= 4 * STRIPE_BYTES


def test_pool_keeps_its_pages_on_the_cards_until_it_is_trimmed(memory, topology):
    def held_bytes():
        return memory.stats()["tiers"]["cxl"]["held_bytes"]

    before = held_bytes()
    for num in (2, 12, 2):
        step = [memory.allocate(7 * MIB, Placement(("cxl", "dram")), TensorRole.ACTIVATIONS) for _ in range(num)]
        for buffer in step:
            check_spans(buffer)
            assert bytes_by_tier(buffer, topology) == {"cxl": buffer.nbytes}
        del step, buffer
    assert before + 12 * 7 * MIB <= held_bytes() <= before + 14 * 7 * MIB
    memory.trim()
    assert held_bytes() <= before
