"""A full node spills as configured; nothing is killed, and nothing is lost."""

import warnings

import pytest
import torch

from lightning_cxl import SpillWarning, TierFullError
from lightning_cxl.machine.topology import read_meminfo
from lightning_cxl.memory.host_memory import HostMemory
from lightning_cxl.memory.placement import Placement, TensorRole
from lightning_cxl.memory.resource import PAGE_BYTES, NumaResource
from tests.numa_vm.inside.located import bytes_by_tier, check_spans

MIB = 1 << 20
CHUNK = 64 * MIB
PLACEMENT = Placement(("cxl", "dram"))
ROLE = TensorRole.MASTER_WEIGHTS


def fill(memory, chunk, count, placement=PLACEMENT):
    """Allocate and write chunks, each with its number; return buffers, their tensors, and the warnings."""
    buffers, tensors = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(count):
            buffers.append(memory.allocate(chunk, placement, ROLE))
            tensors.append(buffers[-1].tensor((chunk // 8,), torch.int64).fill_(number))
    return buffers, tensors, [w for w in caught if issubclass(w.category, SpillWarning)]


def most_of_the_cards(memory):
    """Allocate three quarters of the cards; return the buffer, and one number of every page, which counts up."""
    nbytes = memory.topology.tier("cxl").capacity_bytes * 3 // 4 // PAGE_BYTES * PAGE_BYTES
    buffer = memory.allocate(nbytes, Placement(("cxl",)), ROLE)
    pages = buffer.tensor((nbytes // PAGE_BYTES, PAGE_BYTES // 8), torch.int64)[:, 0]
    return buffer, pages.copy_(torch.arange(len(pages)))


def check_contents(tensors):
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number).all()), f"chunk {number} changed"


def tiers_of(buffers, topology):
    """Return the one tier of every buffer."""
    found = []
    for buffer in buffers:
        check_spans(buffer)
        ((tier, _),) = bytes_by_tier(buffer, topology).items()
        found.append(tier)
    return found


def free_bytes(topology, node):
    return read_meminfo(topology.root / f"sys/devices/system/node/node{node}/meminfo")["MemFree"]


def test_a_full_budget_spills_with_one_warning(topology):
    memory = HostMemory(topology, budgets={"cxl": 32 * MIB})
    buffers, tensors, spills = fill(memory, 8 * MIB, 8)
    assert tiers_of(buffers, topology) == ["cxl"] * 4 + ["dram"] * 4
    assert len(spills) == 1 and "`cxl`" in str(spills[0].message)
    check_contents(tensors)


def test_a_full_budget_leaves_its_part_of_a_split_to_the_other_tier(topology):
    memory = HostMemory(topology, budgets={"cxl": 32 * MIB})
    buffers, tensors, spills = fill(memory, 16 * MIB, 8, Placement(("dram", "cxl"), shares=(0.5, 0.5)))
    for buffer in buffers:
        check_spans(buffer)
    on_cards = [bytes_by_tier(buffer, topology).get("cxl", 0) for buffer in buffers]
    assert on_cards == [8 * MIB] * 4 + [0] * 4
    assert len(spills) == 1
    check_contents(tensors)


@pytest.mark.parametrize("holder", ["this memory", "another one"])
def test_full_cards_spill_and_nothing_is_lost(topology, holder):
    memory = HostMemory(topology)
    held, pages = most_of_the_cards(memory if holder == "this memory" else HostMemory(topology))
    count = (topology.tier("cxl").capacity_bytes - held.nbytes) // CHUNK + 2
    buffers, tensors, spills = fill(memory, CHUNK, count)
    tiers = tiers_of(buffers, topology)
    first = tiers.index("dram")
    assert tiers == ["cxl"] * first + ["dram"] * (count - first)
    assert held.nbytes + first * CHUNK >= 0.85 * topology.tier("cxl").capacity_bytes, "head-room is small"
    assert len(spills) == 1
    check_contents(tensors)
    check_spans(held)
    assert torch.equal(pages, torch.arange(len(pages)))


def test_error_mode_refuses_and_keeps_what_there_is(topology):
    memory = HostMemory(topology, on_tier_full="error")
    held, pages = most_of_the_cards(memory)
    buffers = []
    with pytest.raises(TierFullError, match=r"master_weights.*`cxl`"):
        while True:
            buffers.append(memory.allocate(CHUNK, PLACEMENT, ROLE))
    assert buffers and tiers_of(buffers, topology) == ["cxl"] * len(buffers)
    check_spans(held)
    assert torch.equal(pages, torch.arange(len(pages)))


def test_pages_that_the_kernel_puts_elsewhere_are_given_back(topology, cards):
    """As when someone takes the node between the look at its free memory and the first page."""
    node = cards[0]
    leaf = NumaResource("cxl", node, topology, free_bytes=lambda: 1 << 40)
    size = topology.tier("cxl").nodes[0].capacity_bytes + 64 * MIB
    before = free_bytes(topology, 0)
    with pytest.raises(TierFullError, match=f"node {node}"):
        leaf.allocate(size)
    assert free_bytes(topology, node) > 0.85 * topology.tier("cxl").nodes[0].capacity_bytes
    assert free_bytes(topology, 0) > before - 64 * MIB
