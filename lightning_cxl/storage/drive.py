"""One drive: a file of ours in a folder, read and written in whole blocks."""

import contextlib
import errno
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from lightning_cxl.errors import StorageError
from lightning_cxl.storage.system import System, Views

log = logging.getLogger(__name__)

BLOCK_BYTES = max(4096, mmap.PAGESIZE)  # windows show whole pages
HEAD_BYTES = 256 * 2**10
"""At the start of each file, without records: whether direct reads work is tried there."""
_open: "weakref.WeakSet[Drive]" = weakref.WeakSet()
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


class Drive:
    """Reads and writes one file past the page cache (``O_DIRECT``), or through it where the filesystem refuses.

    Thread-safe: nothing here changes after the constructor but the size of the file.
    """

    def __init__(self, path: Path, system: System, *, make: bool = False) -> None:
        self.path = path
        self.direct = True
        self._system = system
        self._end = 0  # of the space that was taken
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0)
        try:
            self.fd = system.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise storage_error("open", path, error) from None
            # a filesystem that refuses may have made the file before it looked at the flag
            self.fd = self._open_buffered(flags & ~os.O_EXCL if make else flags)
        _open.add(self)

    def _open_buffered(self, flags: int) -> int:
        self.direct = False
        log.warning("`%s`: the filesystem refuses O_DIRECT, so its data go through the page cache", self.path)
        try:
            return self._system.open(self.path, flags)
        except OSError as error:
            raise storage_error("open", self.path, error) from None

    def prepare(self) -> Self:
        """Take the head, which holds no record, and see with it whether direct reads work here."""
        self.grow(HEAD_BYTES)
        try:
            with aligned_memory(BLOCK_BYTES) as view:
                self.read([view], 0)
        except StorageError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            self.close()
            self.fd = self._open_buffered(os.O_RDWR)
        return self

    def check_name(self) -> None:
        """Check that the path still leads to the open file: what is written to a file without a name is lost."""
        try:
            same = self._system.identity(self.path) == self._system.identity(self.fd)
        except OSError as error:
            raise storage_error("find", self.path, error) from None
        if not same:
            raise StorageError(f"`{self.path}` is another file than the one that was opened", path=self.path)

    def read(self, views: Views, offset: int) -> None:
        """Fill `views` with what lies at `offset`."""
        self._move("read", self._system.preadv, views, offset)

    def write(self, views: Views, offset: int) -> None:
        self._move("write", self._system.pwritev, views, offset)

    def _move(self, what: str, call: Callable[[int, Views, int], int], views: Views, offset: int) -> None:
        left: Sequence[memoryview] = views
        while left:
            try:
                moved = call(self.fd, left, offset)
            except OSError as error:
                raise storage_error(what, self.path, error, offset) from None
            if moved <= 0:
                ended = OSError(errno.EIO, "the file ends there" if what == "read" else "no byte was written")
                raise storage_error(what, self.path, ended, offset)
            offset += moved
            left = _after(left, moved)

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
        """Wait until all that was written lies on the disk."""
        try:
            self._system.datasync(self.fd)
        except OSError as error:
            raise storage_error("sync", self.path, error) from None

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        try:
            self._system.close(fd)
        except OSError as error:
            raise storage_error("close", self.path, error) from None

    def close_in_child(self) -> None:
        """Let go of the descriptor that a fork has copied; the parent keeps its own."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


@contextlib.contextmanager
def aligned_memory(nbytes: int) -> Iterator[memoryview]:
    """Give memory that direct reads and writes take, filled with zeros."""
    with mmap.mmap(-1, nbytes) as memory, memoryview(memory) as view:
        yield view


def _after(views: Sequence[memoryview], nbytes: int) -> Sequence[memoryview]:
    """Return `views` without their first bytes."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return ()


def storage_error(what: str, path: Path, error: OSError, offset: int | None = None) -> StorageError:
    """Return our error for one of the kernel's."""
    where = "" if offset is None else f" at offset {offset}"
    name = errno.errorcode.get(error.errno or 0, "no errno")
    advice = _ADVICE.get(error.errno or 0, "")
    message = f"cannot {what} `{path}`{where}: {error.strerror} ({name}). {advice}".rstrip()
    return StorageError(message, path=path, offset=offset, errno=error.errno)


def _close_in_child() -> None:
    # a child that outlives its parent would keep the space of a removed file
    for drive in list(_open):
        drive.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
