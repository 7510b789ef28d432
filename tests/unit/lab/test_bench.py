import os

import pytest
import timing
from ssd_bench import contenders, disk_area
from ssd_bench.contenders import ALONE, LOOP, OURS, Job
from timing import Contender, measure

MIB = 1 << 20


def test_medians_spreads_and_ratios(monkeypatch):
    now = [0.0]  # time passes only when a contender says so
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)

    def contender(name, *seconds):
        """Takes so many seconds in its runs, the last number in all that follow."""
        left = list(seconds)

        def run():
            now[0] += left.pop(0) if len(left) > 1 else left[0]

        return Contender(name, lambda: run)

    # the first two runs of each are not counted
    timings = measure([contender("a", 9, 9, 1, 2, 3), contender("b", 9, 9, 4, 4, 6)], 3)
    assert timings.seconds == {"a": [1, 2, 3], "b": [4, 4, 6]}
    assert timings.first_seconds == {"a": 9, "b": 9}
    assert (timings.median("a"), timings.spread("a")) == (2, 1.0)
    assert timings.ratio("b", "a") == 2  # of 4, 2 and 2
    assert [timings.fastest(names) for names in (["b", "a"], ["b", "none"], ["none"])] == ["a", "b", None]


@pytest.mark.parametrize("name", [OURS, ALONE, LOOP])
@pytest.mark.parametrize("tensor_bytes", [4096, MIB, 3 * MIB])
def test_each_contender_for_drives_moves_all_tensors_and_no_other_byte(tmp_path, name, tensor_bytes):
    def contender(writes):
        found = [*contenders.our_contenders(job, engine, writes=writes), contenders.plain_loop(job, writes=writes)]
        return next(each for each in found if each.name == name)

    with disk_area.disk_area(tmp_path, 4 * MIB) as area, contenders.our_engine(area) as engine:
        assert area.path.read_bytes() == bytes(area.memory) and len(set(area.memory[:4096])) > 200  # random
        job = Job(area, tensor_bytes)
        before, used = area.path.read_bytes(), job.nbytes
        assert used == area.nbytes // tensor_bytes * tensor_bytes
        area.memory[:] = bytes(area.nbytes)
        took = contender(writes=False).go()
        assert area.memory[:used] == before[:used] and not any(area.memory[used:])
        assert took.seconds > 0 and took.cpu_seconds > 0
        new = os.urandom(area.nbytes)
        area.memory[:] = new
        contender(writes=True).go()
        assert area.path.read_bytes() == new[:used] + before[used:]
