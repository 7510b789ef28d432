import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from lightning_cxl.errors import TierFullError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory import resource as resources
from lightning_cxl.memory.resource import BudgetResource, NumaResource, PinnedResource, PoolResource, StripedResource
from lightning_cxl.native._numa import page_nodes

MIB = 2**20
LIMIT = 64 * MIB


def case_of(resource, held_bytes=lambda: 0, tiers=("cxl",)):
    """A resource, and how many bytes its whole stack holds from the OS."""
    return SimpleNamespace(resource=resource, held_bytes=held_bytes, tiers=tiers)


def numa(topology, free=LIMIT):
    return NumaResource("cxl", 0, topology, free_bytes=lambda: free)


def striped(topology):
    return StripedResource([(numa(topology, LIMIT // 2), 3.0), (numa(topology, LIMIT // 2), 1.0)])


def pin(upstream):
    return PinnedResource(upstream, register=lambda address, nbytes: None, unregister=lambda address: None)


def make_split(topology):
    """A pool over a budgeted split of both tiers, of which `cxl` has two children that pretend to be nodes."""
    budgets = {"dram": resources.Budget("dram", LIMIT * 3 // 4), "cxl": resources.Budget("cxl", LIMIT // 4)}
    dram = BudgetResource(NumaResource("dram", 0, topology, free_bytes=lambda: 2 * LIMIT), budgets["dram"])
    cxl = BudgetResource(striped(topology), budgets["cxl"])
    pool = PoolResource(pin(StripedResource([(dram, 0.75), (cxl, 0.25)], strict=True)))
    held = lambda: sum(each.held_bytes for each in budgets.values())  # noqa: E731
    return case_of(pool, lambda: (pool.trim(), held())[1], {"dram", "cxl"})


def make_budgeted(topology):
    budget = resources.Budget("cxl", LIMIT)
    return case_of(BudgetResource(numa(topology), budget), lambda: budget.held_bytes)


CASES = {
    "numa": lambda topology: case_of(numa(topology)),
    "striped": lambda topology: case_of(striped(topology)),
    "budget": make_budgeted,
    "pinned": lambda topology: case_of(pin(numa(topology))),
    "pool": lambda topology: case_of(PoolResource(numa(topology), slab_bytes=MIB)),
    "split": make_split,
}


@pytest.fixture(scope="module")
def topology():
    return Topology.detect()


@pytest.fixture(params=CASES)
def case(request, topology):
    return CASES[request.param](topology)


def test_buffer_has_exactly_the_size_and_its_spans_cover_it(case):
    empty = case.resource.allocate(0)
    assert (empty.nbytes, empty.spans, empty.slice(0, 0).spans) == (0, (), ())
    assert empty.tensor((0, 3), torch.float32).shape == (0, 3)
    for offset in (-4, 1):
        with pytest.raises(ValueError, match=f"needs 4 bytes from {offset} on, of 4"):
            case.resource.allocate(4).tensor((1,), torch.float32, offset)
    for nbytes in (1, 63, 64, 4095, 4096, 100_003, 4 * MIB, 4 * MIB + 1, 9_000_001):
        buffer = case.resource.allocate(nbytes)
        assert buffer.nbytes == nbytes
        position = 0
        for span in buffer.spans:
            assert (span.offset, span.node_id) == (position, 0)
            assert span.tier in case.tiers
            position += span.nbytes
        assert position == nbytes


@pytest.mark.parametrize("nbytes", [100, 5 * MIB + 1])
def test_memory_is_backed_on_return_and_aligned_as_asked(case, nbytes):
    for alignment in (64, 4096, 2 * MIB):
        buffers = [case.resource.allocate(nbytes, alignment=alignment) for _ in range(3)]
        assert [buffer.address % alignment for buffer in buffers] == [0, 0, 0]
        assert [page_nodes(buffer.address, nbytes) for buffer in buffers] == [{0: nbytes}] * 3
        del buffers


def test_living_buffers_never_share_bytes(case):
    sizes = [1, 64, 100, 4096, 5000, 300_000, 3 * MIB, 7 * MIB]
    buffers = [case.resource.allocate(size, alignment=64) for size in sizes * 2]
    tensors = [buffer.tensor((buffer.nbytes,), torch.uint8).fill_(i) for i, buffer in enumerate(buffers)]
    for i, tensor in enumerate(tensors):
        assert bool((tensor == i).all())


def test_too_much_is_refused_and_leaves_nothing_behind(case):
    for nbytes in (LIMIT + 1, 2**40, 2**50, 2**62, 2**63, 2**70):
        before = mapped_bytes()
        with pytest.raises(TierFullError, match=r"tier `(cxl|dram)`"):
            case.resource.allocate(nbytes)
        assert mapped_bytes() <= before + MIB
        assert case.held_bytes() == 0
        assert case.resource.allocate(LIMIT // 4).nbytes == LIMIT // 4


def test_tensor_keeps_its_memory_alive(case):
    tensor = case.resource.allocate(4 * MIB).tensor((MIB,), torch.float32)
    view = tensor.fill_(3.0)[10:20]
    del tensor
    gc.collect()
    case.resource.allocate(4 * MIB).tensor((MIB,), torch.float32).fill_(5.0)
    assert view.tolist() == [3.0] * 10


def test_thousands_of_cycles_do_not_leak(case):
    def cycle(times):
        for i in range(times):
            kept = [case.resource.allocate(size) for size in (100 + i % 7, 70_000, 4 * MIB if i % 20 == 0 else 5000)]
            del kept

    cycle(20)
    before = mapped_bytes()
    cycle(1000)
    assert mapped_bytes() <= before + 16 * MIB
    assert case.held_bytes() == 0


def test_buffers_may_die_on_any_thread_and_inside_the_garbage_collector(case):
    class Knot:
        def __init__(self, buffer):
            self.buffer, self.me = buffer, self

    handed_over, stop = [], threading.Event()

    def reaper():
        while not stop.is_set() or handed_over:
            if handed_over:
                handed_over.pop()

    thread = threading.Thread(target=reaper)
    thread.start()
    try:
        for i in range(300):
            handed_over.append(case.resource.allocate(500 + i))
            Knot(case.resource.allocate(1000 + i))
            if i % 150 == 0:
                gc.collect()
    finally:
        stop.set()
        thread.join()
    gc.collect()
    assert case.held_bytes() == 0


def test_concurrent_allocations_get_disjoint_memory(topology):
    for name in ("pool", "split"):
        resource = CASES[name](topology).resource

        def work(mark, resource=resource, name=name):
            for nbytes in range(100, 3800, 37):
                tensor = resource.allocate(nbytes).tensor((nbytes,), torch.uint8).fill_(mark)
                assert bool((tensor == mark).all()), name

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))


def mapped_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * 4096
