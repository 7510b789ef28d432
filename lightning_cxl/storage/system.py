"""The system calls that storage makes, as methods of one object: tests put one in its place that fails on purpose."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

Views = Sequence[memoryview]
"""Bytes in memory that are read or written one after the other."""


class System:
    """Calls the kernel. Each method is one system call and raises what the kernel says, as `OSError`."""

    def open(self, path: Path, flags: int) -> int:
        """Return a descriptor; a file that is made is for its owner alone (0600)."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def preadv(self, fd: int, views: Views, offset: int) -> int:
        """Read into `views`; returns how many bytes were read, maybe fewer than there is room for."""
        return os.preadv(fd, views, offset)

    def pwritev(self, fd: int, views: Views, offset: int) -> int:
        """Write `views`; returns how many bytes were written, maybe fewer than there are."""
        return os.pwritev(fd, views, offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Take space on the disk for a part of a file, which grows where needed."""
        os.posix_fallocate(fd, offset, nbytes)

    def datasync(self, fd: int) -> None:
        """Wait until what was written lies on the disk, with what is needed to find it."""
        os.fdatasync(fd)

    def sync(self, fd: int) -> None:
        """Wait until a file, or the names in a folder, lie on the disk."""
        os.fsync(fd)

    def size(self, fd: int) -> int:
        """Return the size of a file, in bytes."""
        return os.lseek(fd, 0, os.SEEK_END)

    def identity(self, file: Path | int) -> tuple[int, int]:
        """Return what no two files of a machine share, of the file with a name or of one that is open."""
        found = os.stat(file)
        return found.st_dev, found.st_ino

    def mode(self, path: Path) -> int:
        """Return the mode of what lies at a path: its kind and who may use it."""
        return os.stat(path).st_mode

    def make_folder(self, path: Path) -> None:
        """Make a folder for its owner alone (0700)."""
        os.mkdir(path, 0o700)

    def names(self, folder: Path) -> list[str]:
        return os.listdir(folder)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name; a file that had this name is gone."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a name; the file is gone when nobody has it open or mapped."""
        os.unlink(path)

    def lock(self, fd: int) -> None:
        """Lock a file for this process, without waiting."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self, fd: int) -> None:
        """Let go of the lock, also where a forked child still has the file open."""
        fcntl.flock(fd, fcntl.LOCK_UN)


def exchange(one: Path, other: Path) -> bool:
    """Let two files or folders of one filesystem change their names, at once; return False where it cannot do that."""
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of <linux/fs.h>
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), both) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one), None, str(other))


def sync_folder(folder: Path, system: System | None = None) -> None:
    """Wait until the names in a folder lie on the disk."""
    kernel = system or System()
    fd = kernel.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        kernel.sync(fd)
    finally:
        kernel.close(fd)
