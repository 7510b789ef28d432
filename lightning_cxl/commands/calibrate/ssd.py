"""Speeds of a disk: large sequential writes and reads of a temporary file, past the page cache where possible."""

import errno
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lightning_cxl.commands.calibrate.options import Figure
from lightning_cxl.errors import ConfigError
from lightning_cxl.units import format_bytes

_BLOCK_BYTES = 16 << 20
_IN_FLIGHT = 4  # blocks; a disk alone with one request at a time waits for the next
_ROUNDS = 3


class SsdFigures(NamedTuple):
    """What a folder reaches."""

    read: Figure
    write: Figure
    direct: bool
    """Past the page cache."""


def measure_ssd(folder: Path, nbytes: int) -> SsdFigures:
    """Write and read a file in `folder` in turns; nothing of it stays.

    Args:
        folder: on the disk.
        nbytes: of the file; less where the disk has not twice as much free.

    Raises:
        ConfigError: no such folder, no room in it, or it cannot be written.
    """
    check_ssd(folder)
    free = shutil.disk_usage(folder).free
    nbytes = min(nbytes, free // 2) // _BLOCK_BYTES * _BLOCK_BYTES
    if nbytes == 0:
        raise ConfigError(
            f"--ssd {folder}: {format_bytes(free)} are free, at least {2 * _BLOCK_BYTES >> 20} MiB needed"
        )
    try:
        handle, path = tempfile.mkstemp(dir=folder, prefix=".lightning_cxl-")
        os.close(handle)
        try:
            file, direct = _open(path)
        finally:
            os.unlink(path)  # the file lives until it is closed, and no longer, whatever happens
    except OSError as error:
        raise ConfigError(f"--ssd {folder}: cannot write a file there: {error}") from error
    try:
        return _measure(file, nbytes, direct)
    except OSError as error:
        raise ConfigError(f"--ssd {folder}: {format_bytes(nbytes)} could not be written and read: {error}") from error
    finally:
        os.close(file)


def check_ssd(folder: Path) -> None:
    """Check that there is a folder, which is said before anything is measured.

    Raises:
        ConfigError: no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"--ssd {folder}: there is no such folder")


def _open(path: str) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    return os.open(path, os.O_RDWR), False


def _measure(file: int, nbytes: int, direct: bool) -> SsdFigures:
    seconds: dict[str, list[float]] = {"write": [], "read": []}
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        # mappings are page-aligned, as O_DIRECT wants it; random bytes, because some disks compress
        buffers = [mmap.mmap(-1, _BLOCK_BYTES) for _ in range(_IN_FLIGHT)]
        for buffer in buffers:
            buffer[:] = os.urandom(_BLOCK_BYTES)
        _timed(pool, os.pwritev, file, nbytes, buffers)  # not counted: the file system finds room for it
        for _ in range(_ROUNDS):
            seconds["write"].append(_timed(pool, os.pwritev, file, nbytes, buffers))
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # matters where pages are cached after all
            seconds["read"].append(_timed(pool, os.preadv, file, nbytes, buffers))
        del buffer, buffers
    return SsdFigures(_figure(nbytes, seconds["read"]), _figure(nbytes, seconds["write"]), direct)


def _timed(
    pool: ThreadPoolExecutor,
    access: Callable[[int, list[mmap.mmap], int], int],
    file: int,
    nbytes: int,
    buffers: list[mmap.mmap],
) -> float:
    """Return the seconds of one pass over the file, in blocks that follow each other, several in flight."""

    def lane(index: int) -> None:
        for offset in range(index * _BLOCK_BYTES, nbytes, _IN_FLIGHT * _BLOCK_BYTES):
            done = access(file, [buffers[index]], offset)
            if done != _BLOCK_BYTES:
                raise OSError(errno.EIO, f"{done} of {_BLOCK_BYTES} bytes at {offset}")

    start = time.perf_counter()
    list(pool.map(lane, range(_IN_FLIGHT)))
    os.fsync(file)
    return time.perf_counter() - start


def _figure(nbytes: int, seconds: list[float]) -> Figure:
    median = statistics.median(seconds)
    return Figure(nbytes / median, (max(seconds) - min(seconds)) / median)
