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


def most_of_the_cards(memory):
    """Allocate three quarters of the cards; return the buffer, and one number of every page, which counts up."""
    nbytes = memory.topology.tier("cxl").capacity_bytes * 3 // 4 // PAGE_BYTES * PAGE_BYTES
    buffer = memory.allocate(nbytes, Placement(("cxl",)), ROLE)
    pages = buffer.tensor((nbytes // PAGE_BYTES, PAGE_BYTES // 8), torch.int64)[:, 0]
    return buffer, pages.copy_(torch.arange(len(pages)))


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


@pytest.mark.parametrize("holder", ["this memory", "another one"])
def test_full_cards_spill_and_nothing_is_lost(topology, holder):
    memory = HostMemory(topology)
    held, pages = most_of_the_cards(memory if holder == "this memory" else HostMemory(topology))
    count = (topology.tier("cxl").capacity_bytes - held.nbytes) // CHUNK + 2
    buffers, tensors = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(count):
            buffers.append(memory.allocate(CHUNK, PLACEMENT, ROLE))
            tensors.append(buffers[-1].tensor((CHUNK // 8,), torch.int64).fill_(number))
    tiers = tiers_of(buffers, topology)
    first = tiers.index("dram")
    assert tiers == ["cxl"] * first + ["dram"] * (count - first)
    assert held.nbytes + first * CHUNK >= 0.85 * topology.tier("cxl").capacity_bytes, "head-room is small"
    assert sum(issubclass(each.category, SpillWarning) for each in caught) == 1
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
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
