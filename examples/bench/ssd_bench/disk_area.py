"""Where the SSD benchmark reads and writes: a file on the disk, and as much memory, shared by all that are compared."""

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_cxl.errors import ConfigError
from lightning_cxl.text import format_bytes

BLOCK_BYTES = 4096
_STEP_BYTES = 16 << 20


@dataclass(frozen=True)
class DiskArea:
    """A file whose space is taken and written, and memory of the same size."""

    path: Path
    """Opens the file, also in processes that this one starts."""
    fd: int
    direct: bool
    """Whether reads and writes go past the page cache; some filesystems refuse that."""
    memory: mmap.mmap
    nbytes: int

    def forget(self) -> None:
        """Let the kernel drop its copies of the file: they matter where the page cache takes part."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def disk_area(folder: Path, nbytes: int) -> Iterator[DiskArea]:
    """Make an area for as long as the block runs; its file has no name, so it goes with this process at the latest.

    Args:
        folder: on the disk.
        nbytes: of the file and of the memory, whole blocks.

    Raises:
        ConfigError: no such folder, no room in it, or it cannot be written.
    """
    with ExitStack() as stack:
        try:
            named, name = tempfile.mkstemp(dir=folder, prefix=".lightning_cxl-")
            stack.callback(os.close, named)
            os.unlink(name)
            path = Path(f"/proc/{os.getpid()}/fd/{named}")
            fd, direct = _open(path)
            stack.callback(os.close, fd)
            os.posix_fallocate(fd, 0, nbytes)
            memory = mmap.mmap(-1, nbytes)
            with suppress(OSError):  # some kernels have none
                memory.madvise(mmap.MADV_HUGEPAGE)  # as the slots of a run: the kernel has fewer pages to hold
            area = DiskArea(path, fd, direct, memory, nbytes)
            _fill(area)
        except OSError as error:
            raise ConfigError(
                f"cannot write {format_bytes(nbytes)} in the folder `{folder}`: {error.strerror}. "
                f"Choose another --folder, or less --bytes"
            ) from error
        yield area


def _open(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, os.O_RDWR), False


def _fill(area: DiskArea) -> None:
    """Write random bytes everywhere: some disks compress, and a filesystem finds its blocks at the first write."""
    pattern = os.urandom(_STEP_BYTES)
    with memoryview(area.memory) as view:
        for offset in range(0, area.nbytes, _STEP_BYTES):
            end = min(offset + _STEP_BYTES, area.nbytes)
            view[offset:end] = pattern[: end - offset]
            written = os.pwritev(area.fd, [view[offset:end]], offset)
            if written != end - offset:
                raise OSError(errno.EIO, f"{written} of {end - offset} bytes were written at {offset}")
    os.fsync(area.fd)
