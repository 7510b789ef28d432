"""[Note: Turns at shared weights], with ranks that are threads of one process."""

import os
import subprocess
import sys
import threading
import time

import pytest

from lightning_cxl.errors import LostRankError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.numa import NumaResource
from lightning_cxl.sharding.turns import Counters, Peer, Turns, counters_bytes

UNITS = 3
LATE_S = 0.1


@pytest.fixture
def memory():
    return NumaResource("dram", 0, Topology.detect())


def ranks_of(memory, count=2, pids=None, **options):
    """Return the turns of some ranks, and their counters."""
    counters = [Counters(memory.allocate(counters_bytes(UNITS)), UNITS) for _ in range(count)]
    pids = pids or [os.getpid()] * count
    options = {"timeout_s": 20.0, **options}
    turns = []
    for own in range(count):
        peers = [Peer(rank, pids[rank], counters[rank]) for rank in range(count) if rank != own]
        turns.append(Turns(counters[own], peers, UNITS, **options))
    return turns, counters


def together(*programs):
    """Run programs in threads; return their errors."""
    errors = []

    def run(program):
        try:
            program()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_a_read_waits_for_a_late_writer(memory):
    (one, two), _ = ranks_of(memory)
    events = []

    def writes():
        time.sleep(LATE_S)
        events.append("written")
        one.come(0)
        one.leave(0)

    def reads():
        two.come(0)
        events.append("read")
        two.leave(0)

    assert together(writes, reads) == []
    assert events == ["written", "read"]


def test_a_write_waits_for_a_late_reader(memory):
    (one, two), _ = ranks_of(memory)
    events = []

    def writes():
        one.come(0)
        one.leave(0)
        events.append("written")

    def reads():
        two.come(0)
        time.sleep(LATE_S)
        events.append("read")
        two.leave(0)

    assert together(writes, reads) == []
    assert events == ["read", "written"]


def test_three_ranks_read_what_all_had_written_before_the_gather(memory):
    """Values are written in two halves, with no other care than that of a user; who reads sees equal halves."""
    ranks, _ = ranks_of(memory, 3)
    values = [[0, 0] for _ in ranks]
    seen = []

    def program(own):
        for update in range(1, 60):
            values[own][0] = update
            time.sleep(0.0003 * ((own + update) % 3))
            values[own][1] = update
            ranks[own].come(1)
            for value in values:
                time.sleep(0.0002 * ((own + 2 * update) % 3))
                seen.append((update, tuple(value)))
            ranks[own].leave(1)

    assert together(*(lambda own=own: program(own) for own in range(3))) == []
    assert len(seen) == 3 * 3 * 59
    assert all(value == (update, update) for update, value in seen)


def test_who_fails_in_a_gather_does_not_hold_up_the_others(memory):
    (one, two), _ = ranks_of(memory, timeout_s=5.0)

    def fails():
        one.come(0)
        one.give_up(0)
        raise KeyError("a copy")

    def goes_on():
        two.come(0)
        two.leave(0)

    (error,) = together(fails, goes_on)
    assert isinstance(error, KeyError)


def test_a_process_that_has_ended_is_told_from_one_that_is_late(memory):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (turns, _), counters = ranks_of(memory, pids=[os.getpid(), child.pid], timeout_s=2.0)
    with pytest.raises(LostRankError) as late:
        turns.come(0)
    assert f"rank 1 (process {child.pid}) is alive, but did not come to a gather of unit 0" in str(late.value)
    assert "it has come to 0 gathers, this rank to 1" in str(late.value)
    child.kill()  # not waited for: also a zombie has ended
    begin = time.monotonic()
    with pytest.raises(LostRankError, match=f"process {child.pid}\\) has ended"):
        turns.come(0)
    assert time.monotonic() - begin < 2.0, "nobody waits for a process that has ended"
    counters[1].come[0] = counters[0].come[0]
    child.communicate()
    with pytest.raises(LostRankError, match=r"has ended; .* finish reading unit 0"):
        turns.leave(0)
