"""`SharedSegment`: memory of one process that other processes of the machine map, too.

It is a file without a name (``memfd_create``), which lives as long as somebody has it open or mapped: processes that
are killed leave nothing behind. Others open it through ``/proc/PID/fd``, which needs the same user and the same table
of process ids (namespace), and they check a mark that nobody can guess, so that a chance meeting of numbers cannot
show them the memory of somebody else.
"""

import fcntl
import os
import secrets
from typing import NamedTuple, Protocol

from lightning_cxl.errors import TierFullError, UnsupportedError
from lightning_cxl.memory.numa import HUGE_PAGE_BYTES, PAGE_BYTES, PageNodes, check_nodes, whole_pages
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import Mapping, Range
from lightning_cxl.units import format_bytes

_MARK_BYTES = 64  # a line of the cache
_ALIGNMENT = 64


class SegmentName(NamedTuple):
    """What another process needs to map a segment; can be pickled."""

    pid: int
    fd: int
    nbytes: int
    mark: bytes


class BackFile(Protocol):
    """Gives memory to a file of memory."""

    def __call__(self, nbytes: int, fd: int) -> Buffer:
        """Return a buffer over the whole file, its pages placed and populated."""


class SharedSegment:
    """Hands out parts of one segment, in order, which together are what other processes see of it.

    Its pages are placed and populated before anybody else maps them, so they lie where `back` puts them, and a budget
    is charged once: in this process. What has been handed out does not come back; the memory is free when all
    processes have let go of all buffers and mappings.
    """

    def __init__(self, nbytes: int, back: BackFile) -> None:
        whole = whole_pages(_MARK_BYTES + nbytes)
        self._fd = _make_file(whole)
        try:
            self._buffer = back(whole, self._fd)
        except BaseException:
            self.lock_door()
            raise
        self._used = _MARK_BYTES
        self._mark = secrets.token_bytes(_MARK_BYTES)
        memoryview(Range(self._buffer.address, _MARK_BYTES, self._buffer))[:] = self._mark

    @property
    def address(self) -> int:
        """First byte; offsets in the segment count from here, in every process."""
        return self._buffer.address

    @property
    def nbytes(self) -> int:
        """Size in whole pages."""
        return self._buffer.nbytes

    @property
    def name(self) -> SegmentName:
        """What other processes need to map it."""
        return SegmentName(os.getpid(), self._fd, self.nbytes, self._mark)

    def check_nodes(self, where: PageNodes | None) -> None:
        """Check that page-locking has moved no page; see `pinned.check_nodes`."""
        check_nodes(self._buffer, where)

    def lock_door(self) -> None:
        """Let no further process map it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def allocate(self, nbytes: int, *, alignment: int = _ALIGNMENT) -> Buffer:
        """Return the next `nbytes`."""
        begin = -(-self._used // alignment) * alignment
        if begin + nbytes > self.nbytes:
            raise TierFullError(
                f"cannot take {format_bytes(nbytes)} of a shared segment of {format_bytes(self.nbytes)}, of which "
                f"{format_bytes(self._used)} are in use: its size is fixed when it is made. Make a larger one."
            )
        self._used = begin + nbytes
        return self._buffer.slice(begin, nbytes)

    def offset(self, buffer: Buffer) -> int:
        """Return where a buffer of this segment begins in it."""
        return buffer.address - self.address

    def deallocate(self, buffer: Buffer) -> None:
        """Nothing to do: parts keep the whole alive, and do not come back to it."""

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.lock_door()


class ForeignSegment:
    """The segment of another process, mapped here. Its budget is the other process's."""

    def __init__(self, name: SegmentName) -> None:
        path = f"/proc/{name.pid}/fd/{name.fd}"
        advice = (
            "Processes can share memory where they run on one machine, as one user, and see each other in /proc "
            "(for containers: one namespace of process ids)."
        )
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise UnsupportedError(f"cannot open the memory of another process, {path}: {error}. {advice}") from error
        try:
            if os.fstat(fd).st_size != name.nbytes:
                raise UnsupportedError(f"{path} is not the memory that its process shares. {advice}")
            self._mapping = Mapping(name.nbytes, HUGE_PAGE_BYTES, False, fd)
        except OSError as error:
            raise UnsupportedError(
                f"cannot map {format_bytes(name.nbytes)} of another process, {path}: {error}. Raise `ulimit -v`."
            ) from error
        finally:
            os.close(fd)
        if bytes(Range(self.address, _MARK_BYTES, self._mapping)) != name.mark:
            raise UnsupportedError(f"{path} is not the memory that its process shares. {advice}")

    @property
    def address(self) -> int:
        """First byte; offsets in the segment count from here."""
        return self._mapping.address

    @property
    def nbytes(self) -> int:
        """Size in whole pages."""
        return self._mapping.nbytes

    def part(self, offset: int, nbytes: int) -> Buffer:
        """Return bytes of it; no tier is asked for them here, so they have no spans."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self._mapping.nbytes:
            raise ValueError(f"[{offset}, {offset + nbytes}) is outside a segment of {self._mapping.nbytes} bytes")
        return Buffer(self.address + offset, nbytes, (), None, self._mapping)


def segment_bytes(sizes: list[int]) -> int:
    """Return what a `SharedSegment` for requests of these sizes needs as `nbytes`."""
    return sum(-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in sizes)


def _make_file(nbytes: int) -> int:
    assert nbytes % PAGE_BYTES == 0
    try:
        fd = os.memfd_create("lightning_cxl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise UnsupportedError(
            f"the kernel makes no memory that processes can share ({error}). In a container allow the system call "
            "memfd_create, and raise the limit of open files if that is what is missing (ulimit -n)."
        ) from error
    try:
        os.ftruncate(fd, nbytes)
        # nobody can make it smaller under those who have mapped it
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise TierFullError(f"cannot make {format_bytes(nbytes)} of shared memory: {error}.") from error
    return fd
