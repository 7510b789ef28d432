import mmap
import os
import random
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lightning_cxl.devices import CudaDevices
from lightning_cxl.errors import LightningCXLWarning, PinnedMemoryError, PlacementError, TierFullError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory import resource as resources
from lightning_cxl.memory.resource import BudgetResource, NumaResource, PinnedResource, PoolResource, StripedResource
from lightning_cxl.native._numa import NOWHERE, Mapping, Range, page_nodes
from tests.fakes import fake_topology
from tests.unit.memory.host import MIB, Leaf

PAGE = 4096


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([page]) * PAGE for page in range(1, 5)))
    fd = os.open(path, os.O_RDWR)
    yield path, fd
    os.close(fd)


def test_a_part_shows_a_file_and_what_is_written_there_stays_private(file):
    path, fd = file
    before = path.read_bytes()
    mapping = Mapping(4 * PAGE)
    shown = memoryview(Range(mapping.address, mapping.nbytes, mapping))
    shown[0] = 9
    mapping.show(PAGE, 2 * PAGE, fd, 2 * PAGE)
    assert bytes(shown) == bytes([9]) + bytes(PAGE - 1) + bytes([3]) * PAGE + bytes([4]) * PAGE + bytes(PAGE)
    shown[PAGE] = 7
    assert path.read_bytes() == before
    mapping.show(PAGE, 2 * PAGE, fd, 2 * PAGE)
    assert shown[PAGE] == 3
    mapping.hide(PAGE, PAGE)
    assert not any(shown[PAGE : 2 * PAGE]) and shown[2 * PAGE] == 4 and shown[0] == 9
    shown[PAGE] = 1
    with pytest.raises(OSError, match="cannot show"):
        mapping.show(PAGE, 2 * PAGE, -1, 0)
    assert not any(shown[PAGE:]) and shown[0] == 9, "what cannot show a file reads as zeros"


@pytest.mark.parametrize(("offset", "nbytes"), [(1, PAGE), (PAGE, PAGE), (0, 2 * PAGE), (2**63, PAGE)])
def test_only_whole_pages_inside_the_mapping_and_of_a_file(file, offset, nbytes):
    mapping = Mapping(PAGE)
    show = lambda *part: mapping.show(*part, file[1], 0)  # noqa: E731
    for method in (mapping.hide, show, mapping.populate, mapping.discard, mapping.advise_huge):
        with pytest.raises(ValueError, match="page"):
            method(offset, nbytes)
    for file_offset in (1, -PAGE):
        with pytest.raises(ValueError):
            mapping.show(0, PAGE, file[1], file_offset)


def test_mapping_is_backed_only_where_populated():
    mapping = Mapping(8 * MIB, 2 * MIB)
    assert mapping.address % (2 * MIB) == 0
    assert page_nodes(mapping.address, mapping.nbytes) == {NOWHERE: 8 * MIB}
    mapping.populate(MIB, MIB)
    assert page_nodes(mapping.address, mapping.nbytes) == {0: MIB, NOWHERE: 7 * MIB}
    mapping.discard(MIB, 4096)
    assert page_nodes(mapping.address + MIB + 100, 4096) == {NOWHERE: 3996, 0: 100}


def node(where=None, **options):
    return NumaResource("dram", 0, Topology.detect(), where=where, **options)


def test_a_full_node_is_refused_before_anything_is_touched_and_no_more_is_held_than_asked():
    asked = []
    resource = node(lambda *part: asked.append(part) or page_nodes(*part), free_bytes=lambda: 10 * MIB)
    with pytest.raises(TierFullError, match=r"11\.0 MiB on node 0 of tier `dram`: 10\.0 MiB free"):
        resource.allocate(11 * MIB)
    assert asked == []
    assert resource.allocate(10 * MIB).nbytes == 10 * MIB

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    buffer = node().allocate(33 * MIB + 1)  # a power of two would be 64
    assert 33 * MIB <= resident() - before < 36 * MIB
    assert buffer.tensor((33, MIB), torch.uint8).fill_(1).sum().item() == 33 * MIB


@pytest.mark.parametrize("discards", [False, True])
def test_pages_that_land_elsewhere_are_moved_and_then_accepted(discards):
    """Linux 6.12 discards zero pages of a huge page that it splits: they are populated again."""
    mapping, found = Mapping(4 * MIB), []

    def where(address, nbytes):
        found.append(page_nodes(address, nbytes))
        if len(found) == 1 and discards:
            mapping.discard(0, 2 * MIB)
        return {0: nbytes - 4096, 1: 4096} if len(found) == 1 else found[-1]

    node(where).back(mapping, [(0, 4 * MIB)])
    assert found == [{0: 4 * MIB}] * 2


@pytest.mark.parametrize(("elsewhere", "text"), [(1, r"on node 1\. They were given back"), (NOWHERE, "nowhere")])
def test_pages_that_stay_elsewhere_or_unbacked_are_given_back(elsewhere, text):
    resource, mapping = node(lambda _, nbytes: {0: nbytes - 8192, elsewhere: 8192}), Mapping(4 * MIB)
    with pytest.raises(TierFullError, match=rf"8\.0 KiB {text}"):
        resource.back(mapping, [(MIB, 2 * MIB)])
    assert page_nodes(mapping.address, mapping.nbytes) == {NOWHERE: 4 * MIB}


def test_a_kernel_that_refuses_is_an_error_where_there_are_several_nodes():
    with pytest.raises(PlacementError, match="allow the system call move_pages"):
        node(Mock(side_effect=PermissionError(1, "Operation not permitted"))).allocate(4096)
    with pytest.raises(PlacementError, match=r"node 1 of tier `cxl`.*CAP_SYS_NICE"):  # which does not exist here
        NumaResource("cxl", 1, fake_topology(dram=("1GiB",), cxl=("1GiB",))).allocate(4096)
    single = NumaResource("dram", 900, fake_topology(dram=("1GiB",), cxl=()), free_bytes=lambda: MIB)
    assert single.allocate(4096).nbytes == 4096


def bytes_by_label(buffer):
    count: Counter[int] = Counter()
    for span in buffer.spans:
        count[span.node_id] += span.nbytes
    return count


def test_stripes_follow_the_weights():
    buffer = StripedResource([(Leaf("cxl", 1), 3.0), (Leaf("cxl", 2), 1.0)]).allocate(64 * MIB)
    assert bytes_by_label(buffer) == {1: 48 * MIB, 2: 16 * MIB}
    assert max(span.nbytes for span in buffer.spans if span.node_id == 2) == 2 * MIB
    assert page_nodes(buffer.address, buffer.nbytes) == {0: 64 * MIB}
    nearly_full = [(Leaf("cxl", 1, free=5 * MIB), 1.0), (Leaf("cxl", 2), 1.0)]
    assert bytes_by_label(StripedResource(nearly_full).allocate(32 * MIB)) == {1: 4 * MIB, 2: 28 * MIB}
    full = StripedResource([(Leaf("cxl", 1, full=True), 1.0), (Leaf("cxl", 2, full=True), 1.0)])
    mapping = Mapping(8 * MIB)
    with pytest.raises(TierFullError, match=r"cannot place 8\.0 MiB on tier `cxl`"):
        full.back(mapping, [(0, 8 * MIB)])
    assert page_nodes(mapping.address, mapping.nbytes) == {NOWHERE: 8 * MIB}, "nothing stays backed"
    # they grow with the tiers, so that the kernel can count them
    capacities = (0, 64 * 2**30, 2**40, 2**40 + 1)
    assert [resources.stripe_bytes_for(capacity) // MIB for capacity in capacities] == [2, 2, 32, 34]


def test_a_turn_comes_when_all_before_it_are_full():
    near, also_near, far = (Leaf("cxl", 1 + index, free=free) for index, free in enumerate((9 * MIB, 9 * MIB, 2**30)))
    resource = StripedResource([(far, 1.0), (near, 1.0), (also_near, 1.0)], turns=[21, 10, 10])
    assert bytes_by_label(resource.allocate(12 * MIB)) == {1: 6 * MIB, 2: 6 * MIB}
    buffer = resource.allocate(32 * MIB)
    assert bytes_by_label(buffer) == {1: 8 * MIB, 2: 8 * MIB, 3: 16 * MIB}
    assert buffer.spans[-1].node_id == 3
    unexpected = StripedResource([(Leaf("cxl", 1, full=True), 1.0), (Leaf("cxl", 2), 1.0)], turns=[10, 21])
    assert bytes_by_label(unexpected.allocate(8 * MIB)) == {2: 8 * MIB}


class Driver(dict[int, int]):
    """Registers ranges as the CUDA driver does: whole, disjoint, up to a limit of locked bytes."""

    def __init__(self, limit=2**40):
        self.limit = limit

    def register(self, address, nbytes):
        if sum(self.values()) + nbytes > self.limit:
            raise PinnedMemoryError("locked-memory limit")
        assert address not in self
        self[address] = nbytes

    def resource(self, budget, **options):
        upstream = BudgetResource(Leaf(), budget)
        return PinnedResource(upstream, register=self.register, **{"unregister": self.pop, **options})


@pytest.fixture
def budget():
    return resources.Budget("dram", 64 * MIB)


def test_memory_is_registered_as_a_whole_and_unregistered_before_it_goes_back_by_its_own_process(budget, monkeypatch):
    driver, order = Driver(), []
    resource = driver.resource(budget, unregister=lambda at: order.append((driver.pop(at), budget.held_bytes)))
    buffer = resource.allocate(10 * MIB)
    assert driver == {buffer.address: 10 * MIB}
    del buffer
    assert driver == {} and order == [(10 * MIB, 10 * MIB)], "still held while it was unregistered"
    assert budget.held_bytes == 0
    driver = Driver()
    buffer = driver.resource(budget).allocate(MIB)
    monkeypatch.setattr("os.getpid", lambda: 1)
    del buffer
    assert list(driver.values()) == [MIB]


def test_failure_falls_back_to_pageable_with_one_warning_or_is_raised_when_pinning_is_required(budget):
    driver = Driver(limit=6 * MIB)
    resource = driver.resource(budget, required=True)
    with pytest.raises(PinnedMemoryError, match="locked-memory limit"):
        resource.allocate(10 * MIB)
    assert driver == {} and budget.held_bytes == 0
    assert resource.allocate(5 * MIB).nbytes == 5 * MIB
    resource = driver.resource(budget)
    with pytest.warns(LightningCXLWarning, match=r"page-lock 10\.0 MiB.*ulimit -l.*memlock=-1.*pageable") as caught:
        buffers = [resource.allocate(10 * MIB), resource.allocate(1 * MIB)]
    assert len(caught) == 1 and "page-lock 10.0 MiB" in resource.failure
    assert driver == {} and budget.held_bytes == 11 * MIB
    assert buffers[0].tensor((MIB,), torch.uint8).fill_(1).sum().item() == MIB
    buffers.clear()
    assert budget.held_bytes == 0
    driver, moved = Driver(), lambda address, nbytes: {0: nbytes - MIB, 3: MIB}
    text = r"moved 1\.0 MiB of 8\.0 MiB on nodes \[0\] to nodes \[3\].*--no-movable"
    with pytest.raises(PinnedMemoryError, match=text):
        driver.resource(budget, required=True, where=moved).allocate(8 * MIB)
    assert driver == {} and budget.held_bytes == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torch_sees_the_memory_as_pinned():
    driver, upstream = CudaDevices(), NumaResource("dram", 0, Topology.detect())
    buffer = PinnedResource(upstream, driver.register, driver.unregister, required=True).allocate(8 * MIB)
    tensor = buffer.tensor((MIB,), torch.float32)
    assert tensor.is_pinned()
    assert tensor.fill_(2.0).to("cuda", non_blocking=True).sum().item() == 2.0 * MIB


RANGES = {0: 4096, 4096: 8192, 20480: 1 << 16}  # the first two touch


class Blocks(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.blocks = resources.BlockList()
        for offset, nbytes in RANGES.items():
            self.blocks.add_range(offset, nbytes)
        self.live: dict[int, int] = {}

    @rule(nbytes=st.integers(1, 9000), shift=st.integers(0, 13))
    def allocate(self, nbytes, shift):
        offset = self.blocks.allocate(nbytes, 1 << shift)
        if offset is None:
            assert not any(self.fits(start, end, nbytes, 1 << shift) for start, end in self.gaps())
            return
        assert offset % (1 << shift) == 0
        assert any(start <= offset and offset + nbytes <= end for start, end in self.gaps())
        self.live[offset] = -(-nbytes // 64) * 64

    @rule(data=st.data())
    def free(self, data):
        if self.live:
            offset = data.draw(st.sampled_from(sorted(self.live)))
            self.blocks.free(offset)
            del self.live[offset]

    def gaps(self):
        """The free parts as the live blocks leave them."""
        for start, nbytes in RANGES.items():
            position = start
            for offset in sorted(o for o in self.live if start <= o < start + nbytes):
                yield position, offset
                position = offset + self.live[offset]
            yield position, start + nbytes

    def fits(self, start, end, nbytes, alignment):
        return -(-start // alignment) * alignment + -(-nbytes // 64) * 64 <= end

    @invariant()
    def ranges_are_free_exactly_when_nothing_lives_in_them(self):
        expected = [start for start, size in RANGES.items() if not any(start <= o < start + size for o in self.live)]
        assert self.blocks.free_ranges() == expected
        for start in RANGES.keys() - expected:
            with pytest.raises(ValueError, match="in use"):
                self.blocks.drop_range(start)


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestBlocks = Blocks.TestCase


def usage(pool):
    pool._drain()
    return pool._used_bytes, pool._held_bytes


def test_small_requests_share_a_slab_and_large_ones_get_their_own_which_serve_any_size_that_fits_later():
    upstream = Leaf()
    pool = PoolResource(upstream, slab_bytes=4 * MIB)
    kept = [pool.allocate(size) for size in (100, 200_000, 300_000, MIB, 3 * MIB + 5)]
    assert upstream.sizes == [4 * MIB, MIB, 3 * MIB + 4096]
    assert usage(pool) == (sum(b.nbytes for b in kept), 8 * MIB + 4096)
    upstream = Leaf()
    pool = PoolResource(upstream, slab_bytes=MIB)
    address = pool.allocate(8 * MIB).address
    first, second = pool.allocate(3 * MIB), pool.allocate(5 * MIB)
    assert {first.address, second.address} == {address, address + 3 * MIB}
    del first, second
    assert pool.allocate(8 * MIB).address == address, "the parts are one again"
    assert upstream.sizes == [8 * MIB]


@pytest.mark.parametrize("seed", range(12))
def test_lengths_that_change_beside_gradients_settle(seed):
    """Gradients, whose sizes do not change, come while inputs go, and live on in turns of a few units."""
    draw = random.Random(seed)
    upstream = Leaf()
    pool = PoolResource(upstream, slab_bytes=MIB // 16)
    depth, live = draw.randint(2, 12), draw.randint(1, 3)
    gradients = [draw.randint(4, 40) * 4096 for _ in range(draw.randint(1, 4))]
    lengths = [draw.randint(4, 30) for _ in range(8)]
    peak, taken = 0, []
    for _ in range(5):
        before = len(upstream.sizes)
        for length in lengths:
            inputs = [pool.allocate(length * 4096 - 64) for _ in range(depth)]
            updating = []
            while inputs:
                updating.append([pool.allocate(nbytes) for nbytes in gradients])
                peak = max(peak, usage(pool)[0])
                inputs.pop()
                del updating[: max(0, len(updating) - live)]
            updating.clear()
        taken.append(len(upstream.sizes) - before)
    assert taken[3:] == [0, 0]
    assert usage(pool)[1] <= 1.5 * peak + MIB // 16


def test_free_slabs_do_not_pile_up_beyond_the_peak_and_a_full_upstream_gets_them_back_first():
    pool = PoolResource(Leaf(), slab_bytes=MIB)
    for size in range(1, 40):  # every size is new, so nothing can be reused
        pool.allocate(size * 5 * MIB // 4 + 4096)
    used, held = usage(pool)
    assert used == 0 and held <= 1.125 * (39 * 5 * MIB // 4 + 4096) + MIB
    budget = resources.Budget("dram", 20 * MIB)
    pool = PoolResource(BudgetResource(Leaf(), budget), slab_bytes=MIB)
    both = [pool.allocate(9 * MIB), pool.allocate(9 * MIB)]
    both.clear()
    assert budget.held_bytes == 18 * MIB, "which the pool would keep below its peak of use"
    kept = pool.allocate(12 * MIB)
    assert budget.held_bytes == kept.nbytes == 12 * MIB
    with pytest.raises(TierFullError, match=r"8\.0 MiB of 20\.0 MiB free"):
        pool.allocate(9 * MIB)
    assert usage(pool) == (kept.nbytes, 12 * MIB)


def test_the_end_of_a_budget_smaller_than_a_slab_is_usable():
    budget = resources.Budget("dram", 10 * 4096)
    pool = PoolResource(BudgetResource(Leaf(), budget), slab_bytes=16 * MIB)
    kept = [pool.allocate(4096) for _ in range(10)]
    assert budget.held_bytes == 10 * 4096
    with pytest.raises(TierFullError):
        pool.allocate(1)
    del kept
    assert pool.allocate(1).nbytes == 1
