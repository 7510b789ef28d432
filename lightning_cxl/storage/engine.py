"""Reads and writes that run beside the caller, several at a time on every drive.

[Note: Transfers of storage]
A transfer is many chunks: contiguous parts of one drive, each read or written by one call. Each drive has a queue and
threads for reads, and others for writes: drives do both at once. System calls and checksums release the GIL.

* Order. A transfer begins when those in its `after` are done, with or without an error. Others have no order.
* Alive. The transfer holds the memory until it is done, and not longer: the thread that ends the last chunk drops all
  views first.
* Errors. The first error is kept, chunks that have not begun are left out, and `wait_host` raises the error at every
  call. `Engine.wait` raises errors that nobody has been told.
* Checksums. Each chunk gets one (XXH3, 64 bit) beside its read or write, while its bytes are in the cache. That of
  the transfer is over those of its chunks in their order, so it does not depend on the order in which chunks end. XXH3
  is several times faster than `zlib.crc32`, which would take as much CPU time as a fast drive takes for the transfer.
* End. `finish` gets this checksum when all chunks are done without an error, before `done` is true. Its error counts.
"""

import os
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import xxhash

from lightning_cxl.errors import StorageError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import Range
from lightning_cxl.storage.drive import Drive

CHUNK_BYTES = 4 * 2**20
_THREADS = 8  # where others use the cores, up to 5 % faster than 4 with 8 MiB; see examples/bench/README.md
_MAX_VIEWS = 1024  # IOV_MAX: most parts of memory in one system call

Finish = Callable[[int], None]
_Queue = SimpleQueue["tuple[StorageTransfer, _Chunk] | None"]


class Piece(NamedTuple):
    """Memory, and where its bytes lie on a drive."""

    drive: int
    offset: int
    """On the drive, in bytes."""
    memory: Buffer
    """All of it; address, size and offset are multiples of a block."""


class _Chunk:
    __slots__ = ("drive", "index", "nbytes", "offset", "views")

    def __init__(self, index: int, drive: int, offset: int) -> None:
        self.index = index
        self.drive = drive
        self.offset = offset
        self.nbytes = 0
        self.views: list[memoryview] = []


class StorageTransfer:
    """Reads or writes that are waited for as one. See [Note: Transfers of storage]."""

    __slots__ = (
        "_callbacks", "_checksums", "_chunks", "_engine", "_event", "_finish", "_left", "_waits_for", "_writes",
        "error",
    )  # fmt: skip

    def __init__(self, engine: "Engine", writes: bool, chunks: list[_Chunk], finish: Finish | None) -> None:
        self._engine = engine
        self._writes = writes
        self._chunks = chunks
        self._finish = finish
        self._checksums = [0] * len(chunks)
        self._left = len(chunks)
        self._waits_for = 0
        self._callbacks: list[Callable[[], None]] = []
        self.error: BaseException | None = None  # why it failed, once it is done
        self._event = threading.Event()

    def wait(self) -> None:
        """Do what `wait_host` does: no device takes part."""
        self.wait_host()

    def wait_host(self) -> None:
        """Block until the transfer is done; the memory may then be used."""
        self.wait_done()
        if self.error is not None:
            raise self.error.anew() if isinstance(self.error, StorageError) else self.error

    def wait_done(self) -> None:
        """Block until the transfer is done, with or without an error, which counts as told."""
        self._event.wait()
        if self.error is not None:
            self._engine._told(self)

    def done(self) -> bool:
        """Return whether the transfer is done, with or without an error."""
        return self._event.is_set()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call something once the transfer is done, with or without an error: in the thread that ends it, or now."""
        with self._engine._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()


class Engine:
    """Threads that read and write drives. Thread-safe.

    Args:
        chunk_bytes: most bytes of one system call, a multiple of a block.
    """

    def __init__(self, drives: Sequence[Drive], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._drives = drives
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        kinds = [(drive, writes) for drive in range(len(drives)) for writes in (False, True)]
        self._queues: dict[tuple[int, bool], _Queue] = {kind: SimpleQueue() for kind in kinds}
        self._threads: list[threading.Thread] = []
        self._open: dict[StorageTransfer, None] = {}  # in flight, or failed and nobody was told; in order
        self._closed = False
        self._pid = os.getpid()
        self.counts = {"read_bytes": 0, "written_bytes": 0, "num_reads": 0, "num_writes": 0}

    def read(
        self, pieces: Sequence[Piece], *, finish: Finish | None = None, after: Sequence[StorageTransfer] = ()
    ) -> StorageTransfer:
        """Start reading into the memory of `pieces`; neighbours on a drive are read by one call."""
        return self._start(False, pieces, finish, after)

    def write(
        self, pieces: Sequence[Piece], *, finish: Finish | None = None, after: Sequence[StorageTransfer] = ()
    ) -> StorageTransfer:
        """Start writing the memory of `pieces`, which must not change before the transfer is done; as `read`."""
        return self._start(True, pieces, finish, after)

    def _start(
        self, writes: bool, pieces: Sequence[Piece], finish: Finish | None, after: Sequence[StorageTransfer]
    ) -> StorageTransfer:
        transfer = StorageTransfer(self, writes, self._cut(pieces), finish)
        with self._lock:
            if self._closed:
                raise StorageError("the storage is closed: nothing can be read or written")
            if os.getpid() != self._pid:
                raise StorageError(
                    "a forked child cannot read or write storage: only its parent has the threads for it"
                )
            if not self._threads:
                self._start_threads()
            self._open[transfer] = None
            transfer._waits_for = 1 + len(after)
        for other in after:
            other.add_done_callback(partial(self._one_before_is_done, transfer))
        self._one_before_is_done(transfer)
        return transfer

    def _one_before_is_done(self, transfer: StorageTransfer) -> None:
        with self._lock:
            transfer._waits_for -= 1
            can_begin = transfer._waits_for == 0
        if can_begin:
            self._begin(transfer)

    def _start_threads(self) -> None:
        for (drive, writes), queue in self._queues.items():
            for number in range(_THREADS):
                name = f"lightning_cxl storage {drive} {'writes' if writes else 'reads'} {number}"
                thread = threading.Thread(target=self._work, args=(queue,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # with fewer threads a drive could have none, and its reads no end
                    self._closed = True
                    raise StorageError(f"cannot start the threads of storage: {error}") from error
                self._threads.append(thread)

    def _cut(self, pieces: Sequence[Piece]) -> list[_Chunk]:
        chunks: list[_Chunk] = []
        for drive, offset, memory in pieces:
            view = memoryview(Range(memory.address, memory.nbytes, memory))
            position = 0
            while position < memory.nbytes:
                last = chunks[-1] if chunks else None
                if (
                    last is None
                    or last.drive != drive
                    or last.offset + last.nbytes != offset + position
                    or last.nbytes == self._chunk_bytes
                    or len(last.views) == _MAX_VIEWS
                ):
                    last = _Chunk(len(chunks), drive, offset + position)
                    chunks.append(last)
                nbytes = min(self._chunk_bytes - last.nbytes, memory.nbytes - position)
                last.views.append(view[position : position + nbytes])
                last.nbytes += nbytes
                position += nbytes
        return chunks

    def _begin(self, transfer: StorageTransfer) -> None:
        if not transfer._chunks:
            self._end(transfer)
        chunks, transfer._chunks = transfer._chunks, []
        for chunk in chunks:
            self._queues[chunk.drive, transfer._writes].put((transfer, chunk))

    def _work(self, queue: _Queue) -> None:
        while (job := queue.get()) is not None:
            self._run(*job)
            del job  # it would keep a transfer until the next one

    def _run(self, transfer: StorageTransfer, chunk: _Chunk) -> None:
        error: BaseException | None = None
        try:
            if transfer.error is None:
                transfer._checksums[chunk.index] = self._move(transfer, chunk)
        except BaseException as caught:
            error = _bare(caught)
        chunk.views = []
        with self._lock:
            if transfer.error is None:
                transfer.error = error
            transfer._left -= 1
            last = transfer._left == 0
        if last:
            self._end(transfer)

    def _move(self, transfer: StorageTransfer, chunk: _Chunk) -> int:
        drive, writes, views = self._drives[chunk.drive], transfer._writes, chunk.views
        if writes:
            drive.write(views, chunk.offset)
        else:
            drive.read(views, chunk.offset)
        if len(views) == 1:
            checksum = xxhash.xxh3_64_intdigest(views[0])
        else:
            several = xxhash.xxh3_64()
            for view in views:
                several.update(view)
            checksum = several.intdigest()
        with self._lock:
            self.counts["written_bytes" if writes else "read_bytes"] += chunk.nbytes
            self.counts["num_writes" if writes else "num_reads"] += 1
        return checksum

    def _end(self, transfer: StorageTransfer) -> None:
        finish, transfer._finish = transfer._finish, None
        if transfer.error is None and finish is not None:
            try:
                checksums = transfer._checksums
                finish(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(checksums)}Q", *checksums)))
            except BaseException as error:
                transfer.error = _bare(error)
        del finish
        with self._lock:
            if transfer.error is None:
                del self._open[transfer]
            transfer._event.set()
            callbacks, transfer._callbacks = transfer._callbacks, []
        for callback in callbacks:
            callback()

    def _told(self, transfer: StorageTransfer) -> None:
        with self._lock:
            self._open.pop(transfer, None)

    def wait(self) -> None:
        """Block until all transfers started so far are done."""
        with self._lock:
            started = list(self._open)
        for transfer in started:
            transfer.wait_done()
        for transfer in started:
            transfer.wait_host()  # raises the first error

    def close(self) -> None:
        """Finish all transfers and end the threads. Idempotent."""
        with self._lock:
            self._closed = True
        try:
            self.wait()
        finally:
            with self._lock:
                started = list(self._open)
            for transfer in started:  # also where Ctrl-C has ended the wait: what follows others needs the threads
                transfer._event.wait()
            threads, self._threads = self._threads, []
            for queue in self._queues.values():
                for _ in range(_THREADS):
                    queue.put(None)
            for thread in threads:
                thread.join()


def _bare(error: BaseException) -> BaseException:
    """Return an error without the frames it came through, which would keep memory alive; those of a mistake stay."""
    if isinstance(error, StorageError):
        error.__context__ = None
        return error.with_traceback(None)
    return error
