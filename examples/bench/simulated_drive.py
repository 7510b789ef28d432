"""A drive of a chosen speed: reads and writes of storage end when such a drive would end them, and take no CPU time.

The drive reads and writes at the same time, each at its speed, which all requests of one direction share: a request
ends when all bytes that were asked for before it, and its own, have passed. Its file lies on a tmpfs (``/dev/shm``), so
it takes as much memory as it has bytes.

No byte is copied. A read shows the file's own pages at the addresses that it was asked to fill, so that an update works
on them, and the write that follows finds its bytes where they belong. What the run computes is real: records,
checksums that are made and compared, losses. What is missing: what DMA takes of the memory's bandwidth, and what the
kernel takes for a request to a drive (showing pages takes about as much).

A write of memory that shows something else is a copy, which takes CPU time. In a run that happens in the first step,
when nothing can be read yet. Where bytes do not count, `keeps_bytes=False` shows the file's bytes in the place of the
copy: they are "written" then.
"""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_cxl.storage.drive import HEAD_BYTES, System

_LATENCY_S = 80e-6  # of one request, what reads of a data-centre drive take
_FIXED, _POPULATE_READ = 0x10, 22  # MAP_FIXED, MADV_POPULATE_READ

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Lane:
    """Lets requests of one direction pass, one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def enter(self, nbytes: int) -> float:
        """Return when a request that comes now has passed."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + nbytes / self._bytes_per_s
            return self._free_at + _LATENCY_S


class SimulatedDrive(System):
    """Makes the system calls of storage on a drive that does not exist.

    Args:
        bytes_per_s: of reads, and of writes.
        keeps_bytes: whether what is written can be read.
    """

    def __init__(self, bytes_per_s: float, *, keeps_bytes: bool = True) -> None:
        self._keeps_bytes = keeps_bytes
        self._reads, self._writes = Lane(bytes_per_s), Lane(bytes_per_s)
        self._lock = threading.Lock()
        self._shown: dict[int, tuple[int, int, int]] = {}  # address: file, bytes there, and their offset in the file

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Show the file's pages in the place of `views`, and wait for the drive."""
        if offset < HEAD_BYTES:  # a label, or a manifest: no record
            return super().preadv(fd, views, offset)
        end = self._reads.enter(views[0].nbytes)
        self._show(fd, views[0], offset)
        return _wait(end, views[0])

    def pwritev(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Copy what is not there yet, and wait for the drive."""
        if offset < HEAD_BYTES:  # a label, or a manifest: no record
            return super().pwritev(fd, views, offset)
        end = self._writes.enter(views[0].nbytes)
        with self._lock:
            is_there = self._shown.get(_address(views[0])) == (fd, views[0].nbytes, offset)
        if not is_there and self._keeps_bytes:
            super().pwritev(fd, views, offset)
        elif not is_there:
            self._show(fd, views[0], offset)
        return _wait(end, views[0])

    def open(self, path: Path, flags: int) -> int:
        """Open a file, through the page cache: its pages are what is shown."""
        return super().open(path, flags & ~os.O_DIRECT)

    def datasync(self, fd: int) -> None:
        """Return at once: there is no power to lose."""

    def _show(self, fd: int, view: memoryview, offset: int) -> None:
        address, nbytes = _address(view), view.nbytes
        with self._lock:
            for start, (_, length, _) in list(self._shown.items()):
                if start < address + nbytes and address < start + length:
                    del self._shown[start]
        flags = mmap.MAP_SHARED | _FIXED
        if _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset) != address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if _libc.madvise(address, nbytes, _POPULATE_READ):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        with self._lock:
            self._shown[address] = (fd, nbytes, offset)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _wait(end: float, view: memoryview) -> int:
    left = end - time.perf_counter()
    if left > 0:
        time.sleep(left)
    return view.nbytes
