import mmap
import subprocess
import sys

import pytest
import torch

from lightning_cxl.errors import PlacementError, TierFullError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.resource import NumaResource
from lightning_cxl.native._numa import NOWHERE, Mapping, page_nodes

MIB = 2**20


class LostPages:
    """Says that pages of node 0 are on node 1 from the n-th question on, as a full node would."""

    def __init__(self, first_wrong: int) -> None:
        self.first_wrong = first_wrong
        self.asked: list[tuple[int, int]] = []

    def __call__(self, address: int, nbytes: int) -> dict[int, int]:
        self.asked.append((address, nbytes))
        return page_nodes(address, nbytes) if len(self.asked) < self.first_wrong else {0: nbytes - 8192, 1: 8192}


@pytest.fixture(scope="module")
def topology() -> Topology:
    return Topology.detect()


def test_mapping_is_backed_only_where_populated() -> None:
    mapping = Mapping(8 * MIB, 2 * MIB)
    assert mapping.address % (2 * MIB) == 0
    assert page_nodes(mapping.address, mapping.nbytes) == {NOWHERE: 8 * MIB}

    mapping.populate(MIB, MIB)
    assert page_nodes(mapping.address, mapping.nbytes) == {0: MIB, NOWHERE: 7 * MIB}

    mapping.discard(MIB, 4096)
    assert page_nodes(mapping.address + MIB + 100, 4096) == {NOWHERE: 3996, 0: 100}


@pytest.mark.parametrize("offset, nbytes", [(1, 4096), (0, 2 * MIB), (2 * MIB, 1), (2**63, 4096)])
def test_parts_outside_a_mapping_are_refused(offset: int, nbytes: int) -> None:
    mapping = Mapping(MIB)
    for method in (mapping.populate, mapping.discard, mapping.advise_huge):
        with pytest.raises(ValueError, match="is not a page-aligned part"):
            method(offset, nbytes)


def test_full_node_is_refused_before_anything_is_touched(topology: Topology) -> None:
    where = LostPages(99)
    resource = NumaResource("dram", 0, topology, free_bytes=lambda: 10 * MIB, where=where)

    with pytest.raises(TierFullError, match=r"11\.0 MiB on node 0 of tier `dram`: 10\.0 MiB free"):
        resource.allocate(11 * MIB)
    assert where.asked == []
    assert resource.allocate(10 * MIB).nbytes == 10 * MIB


def test_pages_that_land_elsewhere_are_moved_and_then_accepted(topology: Topology) -> None:
    class MovedLater(LostPages):
        def __call__(self, address: int, nbytes: int) -> dict[int, int]:
            answer = super().__call__(address, nbytes)
            return answer if len(self.asked) == 1 else {0: nbytes}

    where = MovedLater(1)
    buffer = NumaResource("dram", 0, topology, where=where).allocate(4 * MIB)

    assert where.asked == [(buffer.address, 4 * MIB)] * 2


def test_pages_that_stay_elsewhere_are_given_back(topology: Topology) -> None:
    resource = NumaResource("dram", 0, topology, where=LostPages(1))
    mapping = Mapping(4 * MIB)

    with pytest.raises(TierFullError, match=r"8\.0 KiB on node 1\. They were given back"):
        resource.back(mapping, [(MIB, 2 * MIB)])
    assert page_nodes(mapping.address, mapping.nbytes) == {NOWHERE: 4 * MIB}


def test_pages_that_a_failed_move_left_unbacked_are_populated_again(topology: Topology) -> None:
    mapping = Mapping(4 * MIB)

    def where(address: int, nbytes: int) -> dict[int, int]:
        found = page_nodes(address, nbytes)
        asked.append(found)
        if len(asked) == 1:
            mapping.discard(0, 2 * MIB)  # as Linux 6.12 does with the zero pages of a huge page that it splits
            return {0: nbytes - 4096, 1: 4096}
        return found

    asked: list[dict[int, int]] = []
    NumaResource("dram", 0, topology, where=where).back(mapping, [(0, 4 * MIB)])

    assert asked == [{0: 4 * MIB}] * 2


def test_pages_that_stay_unbacked_are_given_back(topology: Topology) -> None:
    resource = NumaResource("dram", 0, topology, where=lambda address, nbytes: {0: nbytes - 4096, NOWHERE: 4096})

    with pytest.raises(TierFullError, match=r"4\.0 KiB nowhere"):
        resource.allocate(4 * MIB)


def test_a_kernel_that_does_not_answer_is_named(topology: Topology) -> None:
    def refuse(address: int, nbytes: int) -> dict[int, int]:
        raise PermissionError(1, "Operation not permitted")

    with pytest.raises(PlacementError, match="allow the system call move_pages"):
        NumaResource("dram", 0, topology, where=refuse).allocate(4096)


def test_refused_placement_is_an_error_on_several_nodes_and_no_matter_on_one(topology: Topology) -> None:
    several = Topology.fake(dram=("1GiB",), cxl=("1GiB",))  # node 1 does not exist here
    with pytest.raises(PlacementError, match=r"node 1 of tier `cxl`.*CAP_SYS_NICE"):
        NumaResource("cxl", 1, several).allocate(4096)

    single = Topology.fake(dram=("1GiB",), cxl=())
    assert NumaResource("dram", 900, single, free_bytes=lambda: MIB).allocate(4096).nbytes == 4096


def test_only_as_many_bytes_as_asked_are_held(topology: Topology) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * mmap.PAGESIZE

    resource = NumaResource("dram", 0, topology)
    before = resident()
    buffer = resource.allocate(33 * MIB + 1)  # a power of two would be 64

    assert 33 * MIB <= resident() - before < 36 * MIB
    assert buffer.tensor((33, MIB), torch.uint8).fill_(1).sum().item() == 33 * MIB


LARGE_PAGES = """
import mmap, sys
mmap.PAGESIZE = 65536  # as on some aarch64 machines
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.resource import NumaResource
from lightning_cxl.native._numa import Mapping, page_nodes
from lightning_cxl.storage.store import Store
from tests.storage_cases import bytes_of, folders, get, put
from pathlib import Path

for mapping in (Mapping(1), Mapping(65537)):
    assert mapping.nbytes % 65536 == mapping.address % 65536 == 0, (mapping.address, mapping.nbytes)
buffers = [NumaResource("dram", 0, Topology.detect()).allocate(n) for n in (1, 65537)]
assert all(buffer.address % 65536 == 0 and page_nodes(buffer.address, buffer.nbytes) for buffer in buffers)
store = Store(folders(Path(sys.argv[1])), budget_bytes=2**24)
records = [store.reserve(str(n), n) for n in (1, 65537)]  # the second is shown from where the first ends
for seed, record in enumerate(records):
    window, contents = store.window(record), put(store, record, seed)
    assert get(store, record) == contents == bytes_of(window)
store.close()
"""


def test_pages_have_the_size_that_the_machine_says(tmp_path) -> None:
    subprocess.run([sys.executable, "-c", LARGE_PAGES, str(tmp_path)], check=True)
