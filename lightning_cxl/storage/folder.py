"""A folder that one store has for itself: its lock, and small files that are replaced as a whole."""

import contextlib
import errno
import logging
import os
import re
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

from lightning_cxl.errors import ConfigError, StorageError
from lightning_cxl.storage.drive import storage_error
from lightning_cxl.storage.system import System, sync_folder

MANIFEST = "lightning_cxl-manifest.json"
PART = "lightning_cxl-part.json"
"""Lies in the folders of a store that keeps a generation, and says where its manifest is."""
_LOCK = "lightning_cxl.lock"
_NEW = ".new"
_DATA = re.compile(r"lightning_cxl-(?P<store>[0-9a-f]{16})-\d+\.data")
_PID_DIGITS = 20

_held: "weakref.WeakSet[Folder]" = weakref.WeakSet()


class Folder:
    """A folder, made where it does not exist, and locked against other stores until `close`."""

    def __init__(self, path: Path, system: System) -> None:
        self.path = path
        self._system = system
        try:
            with contextlib.suppress(FileExistsError):
                system.make_folder(path)
                sync_folder(path.parent, system)
            if not stat.S_ISDIR(mode := system.mode(path)):
                kind = "a block device" if stat.S_ISBLK(mode) else "no folder"
                raise ConfigError(f"`{path}` is {kind}: give a folder, in a filesystem on the drive")
            self._lock_fd = system.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            raise storage_error("use folder", path, error) from None
        try:
            self._take_lock()
        except BaseException:
            self.close()
            raise
        _held.add(self)

    def _take_lock(self) -> None:
        line = bytearray(_PID_DIGITS)
        try:
            self._system.lock(self._lock_fd)
            line[:] = str(os.getpid()).rjust(_PID_DIGITS).encode()
            self._system.pwritev(self._lock_fd, [memoryview(line)], 0)
        except BlockingIOError:
            with contextlib.suppress(OSError):
                self._system.preadv(self._lock_fd, [memoryview(line)], 0)
            holder = line.decode(errors="replace").strip("\0 ") or "unknown"
            raise ConfigError(
                f"`{self.path}` is in use by process {holder}: two runs cannot share a folder. Choose another one, or "
                f"wait for that process to end"
            ) from None
        except OSError as error:
            raise storage_error("lock", self.path / _LOCK, error) from None

    def data_path(self, store_id: str, drive: int) -> Path:
        """Return the path of a store's data file."""
        return self.path / f"lightning_cxl-{store_id}-{drive}.data"

    def remove_orphans(self, keep: str | None) -> None:
        """Remove what runs that have ended left here: our data files but those of store `keep`, unfinished files."""
        try:
            for name in self._system.names(self.path):
                data = _DATA.fullmatch(name)
                if name in (MANIFEST + _NEW, PART + _NEW) or (data is not None and data["store"] != keep):
                    self._system.unlink(self.path / name)
        except OSError as error:
            raise storage_error("clean", self.path, error) from None

    def read(self, name: str) -> bytes | None:
        """Return the contents of a small file; None where there is none."""
        path = self.path / name
        try:
            fd = self._system.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error("open", path, error) from None
        try:
            try:
                contents = bytearray(self._system.size(fd))
                position = 0
                while position < len(contents):
                    count = self._system.preadv(fd, [memoryview(contents)[position:]], position)
                    if count <= 0:
                        break
                    position += count
                return bytes(contents[:position])
            finally:
                self._system.close(fd)
        except OSError as error:
            raise storage_error("read", path, error) from None

    def write_new(self, name: str, contents: bytes) -> None:
        """Write a file that `publish` gives the name; until then the file of that name stays as it is."""
        path = self.path / (name + _NEW)
        try:
            fd = self._system.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                position, view = 0, memoryview(contents)
                while position < len(contents):
                    count = self._system.pwritev(fd, [view[position:]], position)
                    if count <= 0:
                        raise OSError(errno.EIO, "no byte was written")
                    position += count
                self._system.sync(fd)
            finally:
                self._system.close(fd)
        except OSError as error:
            raise storage_error("write", path, error) from None

    def publish(self, name: str) -> None:
        """Give what `write_new` wrote its name, and wait until that lies on the disk."""
        path = self.path / name
        try:
            self._system.rename(self.path / (name + _NEW), path)
        except OSError as error:
            raise storage_error("replace", path, error) from None
        self.sync()

    def sync(self) -> None:
        """Wait until the names in the folder lie on the disk."""
        try:
            sync_folder(self.path, self._system)
        except OSError as error:
            raise storage_error("sync folder", self.path, error) from None

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._system.unlink(path)
        except OSError as error:
            raise storage_error("remove", path, error) from None

    def close(self) -> None:
        """Let go of the lock. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd < 0:
            return
        try:
            try:
                self._system.unlock(fd)
            finally:
                self._system.close(fd)
        except OSError as error:
            raise storage_error("unlock", self.path / _LOCK, error) from None

    def close_in_child(self) -> None:
        """Let go of the descriptor that a fork has copied; the parent keeps the lock."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)


def _close_in_child() -> None:
    # a lock ends when the last copy of its descriptor is closed: a child must not keep it when its parent is killed
    for folder in list(_held):
        folder.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


# ----------------------------------------------------------------------------------------------------
# Folders of several processes that store on the same drives: each has one for itself, below the one that a user names.
#
# A process removes what an earlier one has left in its own folder. But the next run may have fewer processes, or one.

log = logging.getLogger(__name__)

_NAME = re.compile(r"rank-\d+")


def make_parents(paths: Sequence[Path]) -> None:
    """Make what the folders of a process lie in, where it does not exist; what that lies in must exist."""
    for path in paths:
        try:
            with contextlib.suppress(FileExistsError):
                System().make_folder(path.parent)
        except OSError as error:
            raise StorageError(f"cannot make folder `{path.parent}`: {error.strerror}", path.parent) from None


def remove_left(paths: Sequence[Path]) -> None:
    """Remove the data of processes that have ended from all their folders; what a process uses stays.

    Args:
        paths: the folders that a user has named, one for each drive; they need not exist.
    """
    for path in paths:
        for name in System().names(path) if path.is_dir() else ():
            if _NAME.fullmatch(name) and (path / name).is_dir():
                _remove_left(path / name)


def _remove_left(path: Path) -> None:
    try:
        folder = Folder(path, System())
    except ConfigError:  # its process is still there
        return
    except StorageError as error:
        log.warning(f"what an earlier run may have left in `{path}` stays: {error}")
        return
    try:
        if folder.read(MANIFEST) is None and folder.read(PART) is None:  # else someone keeps a generation there
            folder.remove_orphans(keep=None)
    except StorageError as error:
        log.warning(f"what an earlier run has left in `{path}` stays: {error}")
    finally:
        folder.close()
