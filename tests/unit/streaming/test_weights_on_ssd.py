"""Weights on SSD go through host buffers: right bytes, in order, with a hard cap, and nothing of a user's is lost."""

import threading
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import torch

from lightning_cxl.devices import HostEngine
from lightning_cxl.errors import StorageError
from lightning_cxl.memory.host_memory import has_private_pages
from lightning_cxl.storage.drive import StorageTransfer
from lightning_cxl.storage.store import Store
from lightning_cxl.storage.swap import BufferPool, Swapper
from lightning_cxl.streaming.on_ssd import WeightsOnSsd
from lightning_cxl.streaming.unit_weights import InMemory, Slot, WeightPiece
from tests.storage_cases import Gate, memory_of

SIZES = [8192, 20_000, 4096, 12_288, 20_000]
LARGEST = 20_480


class Weights:
    def __init__(self, folder, num_buffers=2.0, engine=HostEngine):
        self.gate, self.engine = Gate(), engine()
        self.store = Store([folder], budget_bytes=1 << 30, system=self.gate)
        self.swapper = Swapper(self.store, BufferPool(memory_of, int(num_buffers * LARGEST)))
        self.weights = WeightsOnSsd(self.swapper, self.engine)
        self.homes = [self.weights.reserve(f"unit {index}", nbytes) for index, nbytes in enumerate(SIZES)]
        self.values = [torch.full((nbytes,), index + 1, dtype=torch.uint8) for index, nbytes in enumerate(SIZES)]
        for index in range(len(SIZES)):
            self.fill(index, index + 1)

    def shown(self, index):
        return self.homes[index].buffer.tensor((SIZES[index],), torch.uint8)

    def fetch(self, index):
        into = torch.zeros(SIZES[index], dtype=torch.uint8)
        return into, self.homes[index].fetch(HostEngine(), self.shown(index), into, [])

    def arrived(self, index):
        into, fetch = self.fetch(index)
        fetch.wait()
        assert fetch.done()
        return into

    def fill(self, index, value):
        with self.homes[index].filling() as slot:
            slot.tensor((SIZES[index],), torch.uint8).fill_(value)

    def begin_update(self, index, value):
        slot = memory_of(LARGEST)
        slot.tensor((SIZES[index],), torch.uint8).fill_(value)
        self.store.write(self.homes[index].record, slot)

    def is_private(self, index):
        window = self.homes[index].window
        return has_private_pages(window.address, window.nbytes)

    def close(self):
        self.gate.is_open.set()
        self.swapper.close()
        self.store.close()


@pytest.fixture
def rig(tmp_path, request):
    with closing(Weights(tmp_path, *getattr(request, "param", ()))) as made:
        yield made


one_buffer = pytest.mark.parametrize("rig", [(1,)], indirect=True)


@contextmanager
def thread(target):
    """Run `target` behind the test, which is ended when it has; the block begins when it may be in the middle."""
    running = threading.Thread(target=target, daemon=True)
    running.start()
    running.join(0.05)
    yield running
    running.join(20)
    assert not running.is_alive()


@pytest.mark.parametrize("rig", [(0.3,), (1.0,), (2.0,), (8.0,)], indirect=True)
def test_homes_show_what_they_were_filled_with_and_copies_have_it(rig):
    copies = [(index, *rig.fetch(index)) for _ in range(4) for index in range(len(SIZES))]
    for index, into, fetch in copies:
        fetch.wait()
        assert torch.equal(into, rig.values[index])
        assert fetch.done()
    for index, value in enumerate(rig.values):
        assert torch.equal(rig.shown(index), value)
        assert not rig.is_private(index)


def test_what_was_dropped_writes_to_nothing(rig):
    rig.gate.is_open.clear()
    into, fetch = rig.fetch(1)
    fetch.drop()
    into.fill_(99)
    rig.gate.is_open.set()
    fetch.wait_host()
    assert bool((into == 99).all())
    assert torch.equal(rig.arrived(1), rig.values[1])


def test_whoever_drops_waits_for_a_copy_that_is_being_started(rig, monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()
    h2d = HostEngine.h2d

    def slow(engine, source, destination, *, after=None):
        begun.set()
        assert goes_on.wait(20)
        return h2d(engine, source, destination, after=after)

    monkeypatch.setattr(HostEngine, "h2d", slow)
    into, fetch = rig.fetch(0)
    assert begun.wait(20)
    with thread(lambda: (fetch.drop(), into.fill_(99))) as dropping:
        assert dropping.is_alive()
        goes_on.set()
    assert bool((into == 99).all())


@pytest.mark.parametrize("unseen", [False, True])
def test_what_a_user_writes_is_copied_and_then_written(rig, unseen):
    shown = rig.shown(1)
    (shown.data if unseen else shown)[7_000] = 200
    assert rig.is_private(1)
    assert rig.arrived(1)[7_000] == 200
    rig.homes[1].end_access()
    assert not rig.is_private(1)
    assert shown[7_000] == 200 and shown[7_001] == 2
    assert rig.arrived(1)[7_000] == 200


def test_windows_that_are_written_one_after_the_other_keep_little_in_memory(rig):
    """As a checkpoint is loaded."""
    for index in range(len(SIZES)):
        rig.homes[index].begin_access()
        rig.shown(index).add_(10)
        private = [other for other in range(len(SIZES)) if rig.is_private(other)]
        assert sum(rig.homes[other].window.nbytes for other in private) <= 2 * LARGEST
    assert not rig.is_private(0)
    for index, value in enumerate(rig.values):
        assert torch.equal(rig.shown(index), value + 10)


def test_what_an_update_brings_is_not_written_back(rig):
    """An update has begun since the look: what the window shows is about to be old."""
    rig.homes[0].begin_access()
    rig.shown(0).fill_(77)
    rig.homes[0].begin_update()
    before = rig.store.stats()["written_bytes"]
    for index in (1, 3, 4, 2):
        rig.homes[index].begin_access()
    assert rig.store.stats()["written_bytes"] == before
    assert rig.is_private(0)


def test_settled_is_what_was_written_last(rig):
    rig.gate.is_open.clear()
    rig.begin_update(0, 55)
    into, fetch = rig.fetch(0)
    with thread(rig.homes[0].settle) as settled:
        assert settled.is_alive() and not fetch.done()
        rig.gate.is_open.set()
    assert bool((rig.shown(0) == 55).all())
    fetch.wait_host()
    assert bool((into == 55).all())


def test_an_error_is_told_to_whoever_waits_each_time_and_the_next_read_is_another_one(rig):
    rig.gate.fails = "both"
    _, fetch = rig.fetch(0)
    for wait in (fetch.wait, fetch.wait_host, fetch.wait):
        with pytest.raises(StorageError, match="cannot read") as caught:
            wait()
        assert caught.value.errno == 5
    assert fetch.done()
    rig.gate.fails = None
    for _ in range(6):  # more often than there are buffers
        assert torch.equal(rig.arrived(0), rig.values[0])


def test_a_write_that_fails_gives_its_buffer_back(rig):
    for _ in range(6):
        rig.shown(0).fill_(9)
        rig.gate.fails = "both"
        with pytest.raises(StorageError, match="cannot write"):
            rig.homes[0].end_access()
        rig.gate.fails = None
        rig.fill(0, 8)
    assert bool((rig.shown(0) == 8).all())


@one_buffer
def test_a_buffer_is_not_given_away_while_it_is_written(rig, monkeypatch):
    """Who waits for a write is interrupted; another record then needs the buffer."""
    rig.gate.is_open.clear()

    def interrupted(transfer):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(StorageTransfer, "wait_host", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.fill(1, 7)
    with thread(lambda: rig.fill(4, 9)):
        rig.gate.is_open.set()
    rig.store.wait()
    assert bool((rig.shown(1) == 7).all()) and bool((rig.shown(4) == 9).all())


class LateCopy:
    """Is done when its engine lets it through, and reads its source then, as late as a device may."""

    def __init__(self, engine, source, destination):
        self.engine, self.source, self.destination = engine, source, destination
        self.lock = threading.Lock()

    def done(self):
        with self.lock:  # whoever waits second must not copy again: the buffer may have been given away
            if self.source is not None and self.engine.lets_through.is_set():
                self.destination.copy_(self.source)
                self.source = None
            return self.source is None

    def wait_host(self):
        self.engine.is_waited_for.set()
        assert self.engine.lets_through.wait(20)
        self.done()

    wait = wait_host


class LateEngine(HostEngine):
    def __init__(self):
        self.lets_through, self.is_waited_for = threading.Event(), threading.Event()

    def h2d(self, source, destination, *, after=None):
        return LateCopy(self, source, destination)


@pytest.mark.parametrize("rig", [(1, LateEngine)], indirect=True)
def test_who_asks_for_a_copy_does_not_wait_for_another_one_whose_buffer_is_not_given_away(rig):
    copies = []

    def ask():
        for index in (1, 4):
            copies.append((index, *rig.fetch(index)))
        assert rig.engine.is_waited_for.wait(20)  # by the swapper's thread: the only buffer is in use
        copies.append((1, *rig.fetch(1)))

    with thread(ask):
        time.sleep(0.05)
    rig.store.wait()
    rig.engine.lets_through.set()
    for index, into, fetch in copies:
        fetch.wait_host()
        assert torch.equal(into, rig.values[index])


@one_buffer
def test_a_request_that_is_interrupted_copies_nothing(rig, monkeypatch):
    goes_on, late, ask = threading.Event(), rig.gate.preadv, rig.swapper.submit

    def waits(fd, views, offset):
        assert goes_on.wait(20)
        return late(fd, views, offset)

    def interrupted(nbytes, job):
        ask(nbytes, job)
        raise KeyboardInterrupt

    monkeypatch.setattr(rig.gate, "preadv", waits)
    lost = torch.zeros(SIZES[1], dtype=torch.uint8)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(rig.swapper, "submit", interrupted)
        rig.homes[1].fetch(HostEngine(), rig.shown(1), lost, [])
    into, fetch = rig.fetch(4)
    goes_on.set()
    assert fetch._is_started.wait(20)
    assert torch.equal(into, rig.values[4]) and not bool(lost.any())


def unit_of(flat, home):
    """What a slot wants of a unit of one piece."""
    return SimpleNamespace(pieces=[WeightPiece(0, flat, home)], readers=(), versions=tuple)


def test_a_late_copy_does_not_overwrite_the_next_unit(rig):
    rig.gate.is_open.clear()
    slot = Slot(HostEngine(), SIZES[1])
    slot.fetch(unit_of(rig.shown(1), rig.homes[1]), ())
    other = torch.full((SIZES[1],), 99, dtype=torch.uint8)
    slot.fetch(unit_of(other, InMemory(memory_of(4096))), ())
    rig.gate.is_open.set()
    rig.swapper.close()
    slot.wait()
    assert torch.equal(slot.memory, other)


def test_a_unit_that_could_not_be_read_is_fetched_again(rig, monkeypatch):
    unit = unit_of(rig.shown(1), rig.homes[1])
    slot = Slot(HostEngine(), SIZES[1])
    rig.gate.fails = "both"
    slot.fetch(unit, ())
    assert slot.is_image_of(unit)
    with pytest.raises(StorageError):
        slot.wait()
    assert not slot.is_image_of(unit)
    rig.gate.fails = None
    slot.fetch(unit, ())
    slot.wait()
    assert torch.equal(slot.memory, rig.values[1])
    monkeypatch.setattr(rig.swapper, "_pid", 0)  # a copy cannot be started
    with pytest.raises(StorageError):
        slot.fetch(unit, ())
    assert not slot.is_image_of(unit)


def test_what_is_written_back_is_not_older_than_an_update(rig):
    """The window shows what a user wrote until the update's write is done, and that has all of it."""
    rig.homes[0].begin_access()
    rig.shown(0).fill_(5)
    rig.gate.is_open.clear()
    rig.begin_update(0, 55)
    with thread(rig.homes[0].end_access):
        rig.gate.is_open.set()
    rig.store.wait()
    assert bool((rig.shown(0) == 55).all())
