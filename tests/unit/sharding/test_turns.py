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
        with one.writing():
            time.sleep(LATE_S)
            events.append("written")

    def reads():
        with two.writing():
            pass
        two.wait_written(0)
        events.append("read")

    assert together(writes, reads) == []
    assert events == ["written", "read"]


def test_a_write_waits_for_a_late_reader(memory):
    (one, two), _ = ranks_of(memory)
    events = []

    def writes():
        with one.writing():
            events.append("written")

    def reads():
        two.wait_written(0)
        time.sleep(LATE_S)
        events.append("read")
        with two.writing():
            pass

    assert together(writes, reads) == []
    assert events == ["read", "written"]


def test_units_have_turns_of_their_own(memory):
    (one, two), _ = ranks_of(memory)
    order = []

    def first():
        with one.writing([2]):
            order.append("one writes 2")
        one.wait_written(1)
        order.append("one reads 1")
        with one.writing([0, 1]):
            order.append("one writes the others")

    def second():
        with two.writing([2]):
            time.sleep(LATE_S)
            two.wait_written(0)  # another unit is nobody's turn
        time.sleep(LATE_S)
        with two.writing([0, 1]):
            pass

    assert together(first, second) == []
    assert order == ["one writes 2", "one reads 1", "one writes the others"]


def test_three_ranks_never_read_what_is_being_written(memory):
    """Values are written in two halves; who reads sees equal halves, of the update that it has made itself."""
    ranks, _ = ranks_of(memory, 3)
    values = [[0, 0] for _ in ranks]
    seen = []

    def program(own):
        for update in range(1, 60):
            with ranks[own].writing():
                values[own][0] = update
                time.sleep(0.0002 * ((own + update) % 3))
                values[own][1] = update
            ranks[own].wait_written(1)
            seen.extend((update, tuple(value)) for value in values)

    assert together(*(lambda own=own: program(own) for own in range(3))) == []
    assert len(seen) == 3 * 3 * 59
    assert all(value == (update, update) for update, value in seen)


def test_who_fails_while_writing_does_not_hold_up_the_others(memory):
    (one, two), _ = ranks_of(memory)

    def fails():
        with one.writing():
            raise KeyError("an optimizer")

    def goes_on():
        with two.writing():
            pass
        two.wait_written(0)

    (error,) = together(fails, goes_on)
    assert isinstance(error, KeyError)


def test_reads_of_the_device_are_over_before_the_others_write(memory):
    arrived = []
    (one, two), counters = ranks_of(memory, finish_reads=lambda: arrived.append(list(counters[0].arrived)))
    assert together(lambda: one.writing().__enter__(), lambda: two.writing().__enter__()) == []
    assert arrived[0] == [0, 0, 0] and list(counters[0].arrived) == [1, 1, 1]


@pytest.mark.parametrize("use", [lambda turns: turns.wait_written(1), lambda turns: turns.writing().__enter__()])
def test_what_is_being_written_is_not_read_nor_written_again(memory, use):
    (alone,), _ = ranks_of(memory, 1)
    with alone.writing([1]), pytest.raises(ValueError, match=r"unit 1 is (read|written again) while this rank writes"):
        use(alone)
    use(alone)


def test_a_process_that_has_ended_is_told_from_one_that_is_late(memory):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (turns, _), counters = ranks_of(memory, pids=[os.getpid(), child.pid], timeout_s=0.3)
    with pytest.raises(LostRankError) as late, turns.writing():
        raise AssertionError("nobody else has come")
    assert f"rank 1 (process {child.pid}) is alive, but did not stop reading unit 0" in str(late.value)
    assert "it has come to update 0, this rank to 1" in str(late.value)
    child.kill()  # not waited for: also a zombie has ended
    begin = time.monotonic()
    with pytest.raises(LostRankError, match=f"process {child.pid}\\) has ended"), turns.writing():
        raise AssertionError("nobody else has come")
    assert time.monotonic() - begin < 0.3
    counters[1].arrived[0:3] = counters[0].arrived[0:3]
    child.communicate()
    with pytest.raises(LostRankError, match=r"has ended; .* finish its update of unit 0"):
        turns.wait_written(0)
