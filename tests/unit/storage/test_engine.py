import errno
import threading
import weakref
from unittest.mock import Mock

import pytest
import xxhash

from lightning_cxl.errors import StorageError
from lightning_cxl.storage.drive import HEAD_BYTES, Drive, Engine, Piece, System
from tests.fakes import failing
from tests.storage_cases import BLOCK, CHUNK, bytes_of, eventually, fill, memory_of
from tests.unit.memory.host import ends_in_child


class Gate(System):
    """Lets reads and writes pass one by one, and notes them; moves at most `most` bytes of a view at each call."""

    def __init__(self):
        self.opens = threading.Semaphore(1000)
        self.moved: list[tuple[str, int, int]] = []
        self.most = 1 << 30

    def shut(self):
        while self.opens.acquire(blocking=False):
            pass

    def preadv(self, fd, views, offset):
        return super().preadv(fd, self._passes("read", views, offset), offset)

    def pwritev(self, fd, views, offset):
        return super().pwritev(fd, self._passes("write", views, offset), offset)

    def _passes(self, kind, views, offset):
        self.opens.acquire()
        self.moved.append((kind, offset - HEAD_BYTES, sum(view.nbytes for view in views)))
        return views if views[0].nbytes <= self.most else [views[0][: self.most]]


@pytest.fixture
def system():
    return Gate()


@pytest.fixture
def engine(tmp_path, system):
    drives = [Drive(tmp_path / str(index), system, make=True) for index in range(2)]
    for drive in drives:
        drive.grow(1 << 20)
    engine = Engine(drives, CHUNK)
    system.moved.clear()
    yield engine
    system.opens.release(1000)
    engine.close()
    for drive in drives:
        drive.close()


def pieces(memories, drive=0, start=0):
    offset, found = HEAD_BYTES + start, []
    for memory in memories:
        found.append(Piece(drive, offset, memory))
        offset += memory.nbytes
    return found


def test_pieces_are_read_and_written_in_chunks_and_short_transfers_go_on_where_they_stopped(engine, system):
    memories = [memory_of(BLOCK), memory_of(CHUNK + BLOCK)]
    contents = [fill(memory, seed) for seed, memory in enumerate(memories)]
    engine.write(pieces(memories)).wait_host()
    assert sorted(system.moved) == [("write", 0, BLOCK), ("write", BLOCK, CHUNK), ("write", BLOCK + CHUNK, BLOCK)]
    other = memory_of(CHUNK + 2 * BLOCK)
    engine.read(pieces([other])).wait_host()
    assert bytes_of(other) == b"".join(contents)
    system.most = BLOCK
    memory, others = memory_of(3 * CHUNK), [memory_of(2 * BLOCK), memory_of(3 * CHUNK - 2 * BLOCK)]
    contents = fill(memory, 1)
    engine.write(pieces([memory])).wait_host()
    engine.read(pieces(others)).wait_host()
    assert b"".join(map(bytes_of, others)) == contents


def test_the_checksum_is_that_of_the_chunks_in_order(engine):
    memory = memory_of(3 * CHUNK)
    contents = fill(memory, 1)
    found = []
    engine.write(pieces([memory]), finish=found.append).wait_host()
    engine.read(pieces([memory]), finish=found.append).wait_host()
    parts = [contents[start : start + CHUNK] for start in range(0, 3 * CHUNK, CHUNK)]
    of_parts = b"".join(xxhash.xxh3_64_digest(part)[::-1] for part in parts)  # digests are big-endian
    assert found == [xxhash.xxh3_64_intdigest(of_parts)] * 2


@pytest.mark.parametrize("kind", ["read", "write"])
def test_memory_lives_until_the_transfer_is_done_and_not_longer(engine, system, kind):
    system.shut()
    memory = memory_of(3 * CHUNK)
    alive, at_end = weakref.ref(memory), []
    transfer = getattr(engine, kind)(pieces([memory]), finish=lambda checksum: at_end.append(alive()))
    del memory
    system.opens.release(2)
    assert alive() is not None and not transfer.done()
    system.opens.release(1)
    transfer.wait_host()
    assert at_end == [None] and transfer.done()


@pytest.mark.parametrize("code", [0, errno.EIO])
def test_memory_of_a_transfer_that_failed_is_let_go(engine, system, monkeypatch, code):
    def fails(*args):  # a Mock would keep the memory
        raise OSError(code, "")

    if code:
        monkeypatch.setattr(system, "preadv", fails)
    memory = memory_of(3 * CHUNK)
    alive = weakref.ref(memory)
    transfer = engine.read(pieces([memory], start=2 << 20))
    del memory
    eventually(transfer.done)
    eventually(lambda: alive() is None)  # until the thread that ended it waits for the next one
    with pytest.raises(StorageError, match="EIO" if code else "the file ends there"):
        transfer.wait_host()


def test_a_transfer_begins_after_others_also_when_they_failed_or_closing_was_interrupted(engine, system, monkeypatch):
    system.shut()
    memory = memory_of(BLOCK)
    first = engine.write(pieces([memory]))
    failing = engine.read(pieces([memory], start=2 << 20), after=[first])
    last = engine.read(pieces([memory], 1), after=[first, failing])
    system.opens.release(1)
    first.wait_host()
    assert not failing.done() and not last.done()
    system.opens.release(10)
    last.wait_host()
    assert failing.done() and [kind for kind, *_ in system.moved] == ["write", "read", "read"]
    with pytest.raises(StorageError):
        engine.wait()
    engine.wait()
    system.shut()
    first = engine.write(pieces([memory_of(BLOCK)]))
    second = engine.write(pieces([memory_of(BLOCK)]), after=[first])
    opener = threading.Timer(0.1, system.opens.release, [1000])
    opener.start()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "wait", Mock(side_effect=KeyboardInterrupt))
        engine.close()
    opener.join()
    assert first.done() and second.done()


def test_a_read_does_not_wait_for_writes_of_the_same_drive(engine, system, monkeypatch):
    go, write = threading.Event(), system.pwritev
    monkeypatch.setattr(system, "pwritev", lambda *args: go.wait(60) and write(*args))
    try:
        writing = engine.write(pieces([memory_of(32 * CHUNK)]))
        eventually(engine.read(pieces([memory_of(BLOCK)], start=40 * CHUNK)).done)
        assert not writing.done()
    finally:
        go.set()


def test_finish_comes_before_done_and_its_error_is_the_transfers(engine):
    transfers, seen = [], []
    started = threading.Event()

    def finish(checksum):
        started.wait()
        seen.append(transfers[0].done())
        raise ValueError("not this one")

    transfers.append(engine.write(pieces([memory_of(BLOCK)]), finish=finish))
    started.set()
    for _ in range(2):
        with pytest.raises(ValueError, match="not this one"):
            transfers[0].wait_host()
    assert seen == [False]


def test_threads_that_cannot_be_started_are_an_error_and_no_hang(engine, monkeypatch):
    before = threading.active_count()
    failing(monkeypatch, threading.Thread, "start", 6, RuntimeError("can't start new thread"))
    with pytest.raises(StorageError, match="can't start new thread"):
        engine.read(pieces([memory_of(BLOCK)], drive=1))
    with pytest.raises(StorageError, match="closed"):
        engine.read(pieces([memory_of(BLOCK)], drive=1))
    engine.close()
    assert threading.active_count() == before


def test_a_forked_child_which_has_no_threads_is_told_so(engine):
    def is_told():
        with pytest.raises(StorageError, match="forked"):
            engine.read(pieces([memory_of(BLOCK)])).wait_host()
        return True

    engine.read(pieces([memory_of(BLOCK)])).wait_host()
    assert ends_in_child(is_told) == 0
