"""`examples/bench/ssd.py` on a few MiB: what moves."""

import os

import pytest
from ssd_bench import contenders, disk_area
from ssd_bench.contenders import ALONE, LOOP, OURS, DiskContender, Job

MIB = 1 << 20


@pytest.fixture
def area(tmp_path):
    with disk_area.disk_area(tmp_path, 4 * MIB) as area:
        yield area


def contender(name, job, engine, writes) -> DiskContender:
    found = [*contenders.our_contenders(job, engine, writes=writes), contenders.plain_loop(job, writes=writes)]
    return next(each for each in found if each.name == name)


@pytest.mark.parametrize("name", [OURS, ALONE, LOOP])
@pytest.mark.parametrize("tensor_bytes", [4096, MIB, 3 * MIB])
def test_each_contender_moves_all_tensors_and_no_other_byte(area, name, tensor_bytes):
    assert area.path.read_bytes() == bytes(area.memory) and len(set(area.memory[:4096])) > 200  # random
    job = Job(area, tensor_bytes)
    with contenders.our_engine(area) as engine:
        before, used = area.path.read_bytes(), job.nbytes
        assert used == area.nbytes // tensor_bytes * tensor_bytes
        area.memory[:] = bytes(area.nbytes)
        took = contender(name, job, engine, writes=False).go()
        assert area.memory[:used] == before[:used]
        assert not any(area.memory[used:])
        assert took.seconds > 0 and took.cpu_seconds > 0
        new = os.urandom(area.nbytes)
        area.memory[:] = new
        contender(name, job, engine, writes=True).go()
        assert area.path.read_bytes() == new[:used] + before[used:]
