"""One drive: a file of ours in a folder, read and written in whole blocks."""

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import xxhash

from lightning_cxl.errors import ConfigError, StorageError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import Range


class System:
    """The system calls of storage: tests put an object in its place whose calls fail on purpose."""

    close = staticmethod(os.close)
    preadv = staticmethod(os.preadv)
    pwritev = staticmethod(os.pwritev)
    allocate = staticmethod(os.posix_fallocate)
    datasync = staticmethod(os.fdatasync)
    stat = staticmethod(os.stat)
    names = staticmethod(os.listdir)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    lock = staticmethod(fcntl.flock)

    def open(self, path: Path, flags: int) -> int:
        """Return a descriptor; a file that is made is for its owner alone."""
        return os.open(path, flags, 0o600)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o700)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders at once; return False where their filesystem cannot do that."""
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of <linux/fs.h>
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), both) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one), None, str(other))


def sync_folder(folder: Path, system: System | None = None) -> None:
    kernel = system or System()
    fd = kernel.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        kernel.sync(fd)
    finally:
        kernel.close(fd)


log = logging.getLogger(__name__)

BLOCK_BYTES = max(4096, mmap.PAGESIZE)  # windows show whole pages
HEAD_BYTES = 256 * 2**10  # at the start of each file, without records: whether direct reads work is tried there
_ADVICE = {
    errno.ENOSPC: "Free space there, or use a smaller budget.",
    errno.EDQUOT: "Your quota there is used up.",
    errno.EROFS: "The filesystem is read-only: after an error of the drive Linux remounts it so.",
    errno.EIO: "The drive may be failing: see the kernel's log (`dmesg`).",
    errno.ENOENT: "Does the folder still exist?",
    errno.EACCES: "Whose is it, and who may write there?",
    errno.ELOOP: "It is a link: remove the link.",
    errno.ENAMETOOLONG: "Use a folder with a shorter path.",
    errno.EOPNOTSUPP: "This filesystem cannot take space in advance: use ext4, XFS or btrfs.",
}


def storage_error(what: str, path: Path, error: OSError, offset: int | None = None) -> StorageError:
    where = "" if offset is None else f" at offset {offset}"
    name = errno.errorcode.get(error.errno or 0, "no errno")
    advice = _ADVICE.get(error.errno or 0, "")
    message = f"cannot {what} `{path}`{where}: {error.strerror} ({name}). {advice}".rstrip()
    return StorageError(message, path=path, offset=offset, errno=error.errno)


@contextlib.contextmanager
def _reported(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(what, path, error) from None


_open: "weakref.WeakSet[_Opened]" = weakref.WeakSet()


class _Opened:
    """Has one file open, which a forked child has not: it would keep the space of a removed file, or a lock."""

    def __init__(self, path: Path, system: System) -> None:
        self.path = path
        self.fd = -1
        self._system = system
        _open.add(self)

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with _reported("close", self.path):
                self._system.close(fd)


def _close_in_child() -> None:
    for each in list(_open):
        fd, each.fd = each.fd, -1
        if fd >= 0:
            os.close(fd)


os.register_at_fork(after_in_child=_close_in_child)


class Drive(_Opened):
    """Reads and writes one file past the page cache (``O_DIRECT``), or through it where the filesystem refuses.

    Thread-safe: nothing here changes after the constructor but the size of the file.
    """

    def __init__(self, path: Path, system: System, *, make: bool = False) -> None:
        super().__init__(path, system)
        self._end = 0  # of the space that was taken
        self._open(os.O_CREAT | os.O_EXCL if make else 0)
        try:
            self.grow(HEAD_BYTES)
            try:
                self._open(os.O_DIRECT)
                with mmap.mmap(-1, BLOCK_BYTES) as memory, memoryview(memory) as view:  # aligned, as such reads need it
                    self.read(view, 0)
            except StorageError as error:
                if error.errno != errno.EINVAL:
                    raise
                log.warning("`%s`: the filesystem refuses O_DIRECT, so its data go through the page cache", path)
                self._open(0)
        except BaseException:
            self.close()
            raise

    def _open(self, flags: int) -> None:
        self.close()
        with _reported("open", self.path):
            self.fd = self._system.open(self.path, os.O_RDWR | flags)

    def check_name(self) -> None:
        # what is written to a file without a name is lost
        with _reported("find", self.path):
            named, opened = self._system.stat(self.path), self._system.stat(self.fd)
        if not os.path.samestat(named, opened):
            raise StorageError(f"`{self.path}` is another file than the one that was opened", path=self.path)

    def read(self, view: memoryview, offset: int) -> None:
        _move("read", self.path, self._system.preadv, self.fd, view, offset)

    def write(self, view: memoryview, offset: int) -> None:
        _move("write", self.path, self._system.pwritev, self.fd, view, offset)

    def grow(self, end: int) -> None:
        """Take space on the disk for the file up to `end`, now and not when it is written."""
        if end <= self._end:
            return
        try:
            self._system.allocate(self.fd, self._end, end - self._end)
        except OSError as error:
            if error.errno == errno.EINVAL:  # libc writes where the kernel cannot take space, and not to whole blocks
                error = OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            raise storage_error(f"take {end} bytes of", self.path, error) from None
        self._end = end

    def sync(self) -> None:
        with _reported("sync", self.path):
            self._system.datasync(self.fd)


def _move(what: str, path: Path, call: Callable[..., int], fd: int, view: memoryview, offset: int = 0) -> None:
    while view:
        try:
            moved = call(fd, [view], offset)
            if moved <= 0:
                raise OSError(errno.EIO, "the file ends there" if what == "read" else "no byte was written")
        except OSError as error:
            raise storage_error(what, path, error, offset) from None
        offset += moved
        view = view[moved:]


MANIFEST = "lightning_cxl-manifest.json"
PART = "lightning_cxl-part.json"
"""Lies in the folders of a store that keeps a generation, and says where its manifest is."""
_LOCK = "lightning_cxl.lock"
_NEW = ".new"
_DATA = re.compile(r"lightning_cxl-(?P<store>[0-9a-f]{16})-\d+\.data")


class Folder(_Opened):
    """A folder, made where it does not exist, and locked against other stores until `close`."""

    def __init__(self, path: Path, system: System) -> None:
        super().__init__(path, system)
        with _reported("use folder", path):
            with contextlib.suppress(FileExistsError):
                system.make_folder(path)
                sync_folder(path.parent, system)
            if not stat.S_ISDIR(system.stat(path).st_mode):
                raise ConfigError(f"`{path}` is no folder: give a folder, in a filesystem on the drive")
            self.fd = system.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            with _reported("lock", path / _LOCK):
                system.lock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            super().close()
            if not isinstance(error, StorageError) or error.errno != errno.EWOULDBLOCK:
                raise
            raise ConfigError(
                f"`{path}` is in use by another process, which `fuser {path / _LOCK}` names, or by another model of "
                "this process: two cannot share a folder. Choose another one, wait for that process to end, or keep "
                "all but one of your models in memory: decorate blocks with `tier`, as rules match all models"
            ) from None

    def remove_orphans(self, keep: str) -> None:
        """Remove what runs that have ended left here: our data files but those of store `keep`, unfinished files."""
        with _reported("clean", self.path):
            for name in self._system.names(self.path):
                data = _DATA.fullmatch(name)
                if name in (MANIFEST + _NEW, PART + _NEW) or (data is not None and data["store"] != keep):
                    self._system.unlink(self.path / name)

    def read(self, name: str) -> bytes | None:
        path = self.path / name
        with _reported("read", path):
            try:
                fd = self._system.open(path, os.O_RDONLY)
            except FileNotFoundError:
                return None
            try:
                contents = bytearray(self._system.stat(fd).st_size)
                _move("read", path, self._system.preadv, fd, memoryview(contents))
                return bytes(contents)
            finally:
                self._system.close(fd)

    def write_new(self, name: str, contents: bytes) -> None:
        """Write a file that `publish` gives the name; until then the file of that name stays as it is."""
        path = self.path / (name + _NEW)
        with _reported("write", path):
            fd = self._system.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                _move("write", path, self._system.pwritev, fd, memoryview(contents))
                self._system.sync(fd)
            finally:
                self._system.close(fd)

    def publish(self, name: str) -> None:
        """Give what `write_new` wrote its name, and wait until that lies on the disk."""
        path = self.path / name
        with _reported("replace", path):
            self._system.rename(self.path / (name + _NEW), path)
        self.sync()

    def sync(self) -> None:
        with _reported("sync folder", self.path):
            sync_folder(self.path, self._system)

    def remove(self, path: Path) -> None:
        with _reported("remove", path), contextlib.suppress(FileNotFoundError):
            self._system.unlink(path)

    def close(self) -> None:
        """Let go of the lock, also where a forked child still has the file open. Idempotent."""
        try:
            if self.fd >= 0:
                with _reported("unlock", self.path / _LOCK):
                    self._system.lock(self.fd, fcntl.LOCK_UN)
        finally:
            super().close()


def make_parents(paths: Sequence[Path]) -> None:
    """Make what the folders of a process lie in, where it does not exist; what that lies in must exist."""
    for path in paths:
        with _reported("make folder", path.parent), contextlib.suppress(FileExistsError):
            System().make_folder(path.parent)


# Reads and writes that run beside the caller, several at a time on every drive.
#
# [Note: Transfers of storage]
# A transfer is many chunks: contiguous parts of one drive, each read or written by one call. Each drive has a queue and
# threads for reads, and others for writes: drives do both at once. System calls and checksums release the GIL.
#
# * Order. A transfer begins when those in its `after` are done, with or without an error. Others have no order.
# * Alive. The transfer holds the memory until it is done, and not longer: the thread that ends the last chunk drops all
#   views first.
# * Errors. The first error is kept, chunks that have not begun are left out, and `wait_host` raises the error at every
#   call. `Engine.wait` raises errors that nobody has been told.
# * Checksums. Each chunk gets one (XXH3, 64 bit) beside its read or write, while its bytes are in the cache. That of
#   the transfer is over those of its chunks in their order, so it does not depend on the order in which chunks end.
#   XXH3 is several times faster than `zlib.crc32`, which would take as much CPU time as a fast drive takes for the
#   transfer.
# * End. `finish` gets this checksum when all chunks are done without an error, before `done` is true. Its error counts.

CHUNK_BYTES = 4 * 2**20
_THREADS = 8  # where others use the cores, up to 5 % faster than 4 with 8 MiB; see examples/bench/README.md

Finish = Callable[[int], None]
_Queue = SimpleQueue["tuple[StorageTransfer, _Chunk] | None"]


class Piece(NamedTuple):
    """Memory, and where its bytes lie on a drive."""

    drive: int
    offset: int  # on the drive, in bytes
    memory: Buffer  # all of it; address, size and offset are multiples of a block


@dataclass(slots=True)
class _Chunk:
    index: int
    drive: int
    offset: int
    view: memoryview | None  # None: it is done


class StorageTransfer:
    """Reads or writes that are waited for as one. See [Note: Transfers of storage]."""

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

    def wait_host(self) -> None:
        """Wait until the transfer is done; the memory may then be used. Raises its error."""
        self.wait_done()
        if self.error is not None:
            raise self.error.anew() if isinstance(self.error, StorageError) else self.error

    def wait_done(self) -> None:
        """Wait until the transfer is done, with or without an error, which counts as told."""
        self._event.wait()
        if self.error is not None:
            with self._engine._lock:
                self._engine._open.pop(self, None)

    def done(self) -> bool:
        return self._event.is_set()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call something once the transfer is done, with or without an error: in the thread that ends it, or now."""
        with self._engine._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()


class Engine:
    """Threads that read and write drives, `chunk_bytes` at most in one system call. Thread-safe."""

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

    def _start(
        self,
        writes: bool,
        pieces: Sequence[Piece],
        *,
        finish: Finish | None = None,
        after: Sequence[StorageTransfer] = (),
    ) -> StorageTransfer:
        """Start reading into the memory of `pieces`, or writing it; then it must not change until that is done."""
        transfer = StorageTransfer(self, writes, self._cut(pieces), finish)
        with self._lock:
            if self._closed:
                raise StorageError("the storage is closed: nothing can be read or written")
            if os.getpid() != self._pid:
                raise StorageError("a forked child cannot read or write storage: only its parent has threads for it")
            if not self._threads:
                self._start_threads()
            self._open[transfer] = None
            transfer._waits_for = 1 + len(after)

        def begin() -> None:
            with self._lock:
                transfer._waits_for -= 1
                if transfer._waits_for:
                    return
            if not transfer._chunks:
                self._end(transfer)
            chunks, transfer._chunks = transfer._chunks, []
            for chunk in chunks:
                self._queues[chunk.drive, writes].put((transfer, chunk))

        for other in after:
            other.add_done_callback(begin)
        begin()
        return transfer

    read, write = partialmethod(_start, False), partialmethod(_start, True)

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
            for at in range(0, memory.nbytes, self._chunk_bytes):
                chunks.append(_Chunk(len(chunks), drive, offset + at, view[at : at + self._chunk_bytes]))
        return chunks

    def _work(self, queue: _Queue) -> None:
        while (job := queue.get()) is not None:
            self._run(*job)
            del job  # it would keep a transfer until the next one

    def _run(self, transfer: StorageTransfer, chunk: _Chunk) -> None:
        error: BaseException | None = None
        try:
            if transfer.error is None:
                self._move(transfer, chunk)
        except BaseException as caught:
            error = _bare(caught)
        chunk.view = None
        with self._lock:
            if transfer.error is None:
                transfer.error = error
            transfer._left -= 1
            last = transfer._left == 0
        if last:
            self._end(transfer)

    def _move(self, transfer: StorageTransfer, chunk: _Chunk) -> None:
        drive, writes, view = self._drives[chunk.drive], transfer._writes, chunk.view
        assert view is not None
        (drive.write if writes else drive.read)(view, chunk.offset)
        transfer._checksums[chunk.index] = xxhash.xxh3_64_intdigest(view)
        with self._lock:
            self.counts["written_bytes" if writes else "read_bytes"] += view.nbytes
            self.counts["num_writes" if writes else "num_reads"] += 1

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

    def wait(self) -> None:
        """Wait until all transfers started so far are done."""
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
