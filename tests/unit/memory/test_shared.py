"""Memory that several processes map: what it shows, who may map it, and when it is gone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_cxl.errors import TierFullError, UnsupportedError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.numa import Budget, BudgetResource, NumaResource, StripedResource
from lightning_cxl.memory.shared import ForeignSegment, SharedSegment, segment_bytes
from lightning_cxl.native._numa import NOWHERE, Mapping, Range, page_nodes
from tests.shared_places import OnOneTier

MIB = 2**20
OTHER = """
import sys
from lightning_cxl.memory.shared import ForeignSegment, SegmentName
segment = ForeignSegment(SegmentName(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])))
view = segment.part(int(sys.argv[5]), 4).tensor((4,), __import__("torch").uint8)
print(view.tolist(), flush=True)
view[3] = 9
input()
"""


@pytest.fixture
def dram():
    return NumaResource("dram", 0, Topology.detect())


def other_process(segment, buffer):
    name = segment.name
    arguments = [name.pid, name.fd, name.nbytes, name.mark.hex(), segment.offset(buffer)]
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_another_process_sees_the_same_bytes(dram):
    segment = SharedSegment(MIB, OnOneTier(dram).file)
    buffer = segment.allocate(4)
    shown = buffer.tensor((4,), torch.uint8)
    shown.copy_(torch.tensor([1, 2, 3, 4]))
    child = other_process(segment, buffer)
    assert child.stdout.readline() == "[1, 2, 3, 4]\n"
    child.communicate("\n")
    assert shown.tolist() == [1, 2, 3, 9]


def test_nothing_is_left_of_processes_that_were_killed(dram):
    """The memory has no name, and its pages go with the last process; the child had all of them but our mapping."""
    segment = SharedSegment(MIB, OnOneTier(dram).file)
    link = os.readlink(f"/proc/self/fd/{segment.name.fd}")
    assert link.startswith("/memfd:") and link.endswith("(deleted)")
    child = other_process(segment, segment.allocate(4))
    child.stdout.readline()
    assert "/memfd:lightning_cxl" in Path(f"/proc/{child.pid}/maps").read_text()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    del segment
    assert "/memfd:lightning_cxl" not in Path("/proc/self/maps").read_text()


def test_the_door_is_locked_and_what_was_mapped_stays(dram):
    segment = SharedSegment(MIB, OnOneTier(dram).file)
    name = segment.name
    before = ForeignSegment(name)
    segment.allocate(8).tensor((1,), torch.int64).fill_(7)
    segment.lock_door()
    segment.lock_door()
    with pytest.raises(UnsupportedError, match=f"cannot open the memory of another process, /proc/{name.pid}/"):
        ForeignSegment(name)
    del segment
    assert before.part(64, 8).tensor((1,), torch.int64).item() == 7


def test_other_memory_is_not_taken_for_a_segment(dram):
    segment, larger = SharedSegment(MIB, OnOneTier(dram).file), SharedSegment(2 * MIB, OnOneTier(dram).file)
    for wrong in (segment.name._replace(mark=b"x" * 64), segment.name._replace(fd=larger.name.fd)):
        with pytest.raises(UnsupportedError, match="is not the memory that its process shares"):
            ForeignSegment(wrong)


def test_a_file_cannot_shrink_under_those_who_map_it(dram):
    segment = SharedSegment(MIB, OnOneTier(dram).file)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.name.fd, 4096)


def test_parts_are_aligned_counted_and_limited(dram):
    sizes = [1, 100, 64, 0]
    segment = SharedSegment(segment_bytes(sizes), OnOneTier(dram).file)
    buffers = [segment.allocate(size) for size in sizes]
    assert [buffer.address % 64 for buffer in buffers[:3]] == [0, 0, 0]
    assert [segment.offset(buffer) for buffer in buffers[:3]] == [64, 128, 256]
    assert [span.nbytes for span in buffers[1].spans] == [100]
    with pytest.raises(TierFullError, match=r"cannot take 8\.0 KiB of a shared segment of 4\.0 KiB"):
        segment.allocate(8192)
    with pytest.raises(ValueError, match="is outside a segment of 4096 bytes"):
        ForeignSegment(segment.name).part(4000, 100)


def test_pages_lie_on_their_tier_and_its_budget_has_them_back_when_the_last_part_dies(dram):
    budget = Budget("dram", 4 * MIB)
    segment = SharedSegment(3 * MIB, OnOneTier(BudgetResource(dram, budget)).file)
    assert page_nodes(segment.address, segment.nbytes) == {0: segment.nbytes}
    assert budget.held_bytes == segment.nbytes
    with pytest.raises(TierFullError, match="cannot place"):
        SharedSegment(3 * MIB, OnOneTier(BudgetResource(dram, budget)).file)
    part = segment.allocate(8).tensor((1,), torch.int64)
    del segment
    assert budget.held_bytes > 3 * MIB
    del part
    assert budget.held_bytes == 0


def test_a_segment_can_be_striped_and_pages_of_a_full_child_go_back(dram):
    class Full(NumaResource):
        def back(self, mapping, parts):
            super().back(mapping, parts)
            raise TierFullError("no room after all")

    full = Full("full", 0, Topology.detect())
    segment = SharedSegment(8 * MIB - 4096, OnOneTier(StripedResource([(dram, 1.0), (full, 1.0)])).file)
    assert {span.tier for span in segment.allocate(7 * MIB).spans} == {"dram"}


def test_pages_of_a_shared_mapping_are_given_back():
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * MIB)
    mapping = Mapping(2 * MIB, fd=fd)
    memoryview(Range(mapping.address, mapping.nbytes, mapping))[:] = b"x" * 2 * MIB
    mapping.discard(0, MIB)
    assert os.fstat(fd).st_blocks * 512 == MIB
    assert page_nodes(mapping.address, 2 * MIB) == {NOWHERE: MIB, 0: MIB}
    assert os.pread(fd, 1, 0) == b"\0" and os.pread(fd, 1, MIB) == b"x"
    with pytest.raises(ValueError, match="shows no files"):
        mapping.show(0, MIB, fd, 0)
    os.close(fd)


def test_a_file_that_cannot_be_mapped_is_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(PermissionError, match="cannot map 4096 bytes of shared memory"):
        Mapping(4096, fd=fd)
    os.close(fd)
