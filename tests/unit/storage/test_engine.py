"""`Engine`: pieces in one transfer, memory that lives just as long as it must, order, and the end."""

import errno
import os
import threading
import time
import weakref

import pytest
import xxhash

from lightning_cxl.errors import StorageError
from lightning_cxl.storage.drive import HEAD_BYTES, Drive, Engine, Piece, System
from tests.storage_cases import BLOCK, CHUNK, bytes_of, fill, memory_of


class Gate(System):
    """Lets reads and writes pass one by one, and notes them."""

    def __init__(self):
        self.opens = threading.Semaphore(1000)
        self.moved: list[tuple[str, int, int]] = []

    def shut(self):
        while self.opens.acquire(blocking=False):
            pass

    def preadv(self, fd, views, offset):
        self.opens.acquire()
        self.moved.append(("read", offset - HEAD_BYTES, sum(view.nbytes for view in views)))
        return super().preadv(fd, views, offset)

    def pwritev(self, fd, views, offset):
        self.opens.acquire()
        self.moved.append(("write", offset - HEAD_BYTES, sum(view.nbytes for view in views)))
        return super().pwritev(fd, views, offset)


class Short(Gate):
    """Moves one block at each call."""

    def preadv(self, fd, views, offset):
        return super().preadv(fd, [views[0][:BLOCK]], offset)

    def pwritev(self, fd, views, offset):
        return super().pwritev(fd, [views[0][:BLOCK]], offset)


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


def test_pieces_are_read_and_written_in_chunks(engine, system):
    memories = [memory_of(BLOCK), memory_of(CHUNK + BLOCK)]
    contents = [fill(memory, seed) for seed, memory in enumerate(memories)]
    engine.write(pieces(memories)).wait_host()
    assert sorted(system.moved) == [("write", 0, BLOCK), ("write", BLOCK, CHUNK), ("write", BLOCK + CHUNK, BLOCK)]
    other = memory_of(CHUNK + 2 * BLOCK)
    engine.read(pieces([other])).wait_host()
    assert bytes_of(other) == b"".join(contents)


def test_short_transfers_go_on_where_they_stopped(tmp_path):
    drive = Drive(tmp_path / "file", Short(), make=True)
    drive.grow(1 << 20)
    engine = Engine([drive], CHUNK)
    memory, others = memory_of(3 * CHUNK), [memory_of(2 * BLOCK), memory_of(3 * CHUNK - 2 * BLOCK)]
    contents = fill(memory, 1)
    engine.write(pieces([memory])).wait_host()
    engine.read(pieces(others)).wait_host()
    assert b"".join(map(bytes_of, others)) == contents
    engine.close()
    drive.close()


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
    if code:

        def fails(*args):
            raise OSError(code, "")

        monkeypatch.setattr(system, "preadv", fails)
    memory = memory_of(3 * CHUNK)
    alive = weakref.ref(memory)
    transfer = engine.read(pieces([memory], start=2 << 20))
    del memory
    while not transfer.done():
        time.sleep(0.001)
    deadline = time.monotonic() + 60
    while alive() is not None:  # until the thread that ended it waits for the next one
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.raises(StorageError, match="EIO" if code else "the file ends there"):
        transfer.wait_host()


def test_a_transfer_begins_after_others_also_when_they_failed(engine, system):
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


def test_a_read_does_not_wait_for_writes_of_the_same_drive(engine, system, monkeypatch):
    go, write = threading.Event(), system.pwritev
    monkeypatch.setattr(system, "pwritev", lambda *args: go.wait(60) and write(*args))
    try:
        writing = engine.write(pieces([memory_of(32 * CHUNK)]))
        reading = engine.read(pieces([memory_of(BLOCK)], start=40 * CHUNK))
        end = time.monotonic() + 30
        while not reading.done() and time.monotonic() < end:
            time.sleep(0.001)
        assert reading.done()
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


def test_nothing_starts_after_close(engine):
    engine.close()
    with pytest.raises(StorageError, match="closed"):
        engine.read(pieces([memory_of(BLOCK)]))


def test_threads_that_cannot_be_started_are_an_error_and_no_hang(engine, monkeypatch):
    start, count = threading.Thread.start, []

    def fails_at_the_sixth(thread):
        count.append(thread)
        if len(count) == 6:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails_at_the_sixth)
    with pytest.raises(StorageError, match="can't start new thread"):
        engine.read(pieces([memory_of(BLOCK)], drive=1))
    with pytest.raises(StorageError, match="closed"):
        engine.read(pieces([memory_of(BLOCK)], drive=1))
    engine.close()
    assert not any(thread.is_alive() for thread in count)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.timeout(20)
def test_a_forked_child_which_has_no_threads_is_told_so(engine):
    engine.read(pieces([memory_of(BLOCK)])).wait_host()
    child = os.fork()
    if child == 0:
        try:
            engine.read(pieces([memory_of(BLOCK)])).wait_host()
        except StorageError as error:
            os._exit(3 if "forked" in str(error) else 4)
        finally:
            os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_what_follows_another_transfer_is_done_where_closing_was_interrupted(engine, system, monkeypatch):
    system.shut()
    first = engine.write(pieces([memory_of(BLOCK)]))
    second = engine.write(pieces([memory_of(BLOCK)]), after=[first])

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "wait", interrupted)
    opener = threading.Timer(0.1, system.opens.release, [1000])
    opener.start()
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    opener.join()
    monkeypatch.undo()
    assert first.done() and second.done()
