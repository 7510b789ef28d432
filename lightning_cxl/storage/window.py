"""Address ranges that show what lies on drives, without memory of their own."""

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import Mapping
from lightning_cxl.storage.drive import Drive, storage_error


class _Shown(NamedTuple):
    """What a window shows: the same range of each file."""

    paths: tuple[Path, ...]
    begin: int
    end: int


_libc = ctypes.CDLL(None, use_errno=True)
_shown: weakref.WeakKeyDictionary[Buffer, _Shown] = weakref.WeakKeyDictionary()


def files_shown_at(address: int) -> tuple[Path, ...]:
    """Return the files that a window of this process shows at an address; empty where no window shows files."""
    for buffer, shown in list(_shown.items()):
        if 0 <= address - buffer.address < buffer.nbytes:
            return shown.paths
    return ()


def next_unseen(drives: Sequence[Drive], offset: int, nbytes: int) -> int:
    """Return the first offset from which on no window of this process shows bytes of these drives.

    Args:
        drives: of one store.
        offset: where the search begins.
        nbytes: that no window may show.
    """
    own = set(_paths(drives))
    seen = sorted((shown.begin, shown.end) for shown in list(_shown.values()) if own.intersection(shown.paths))
    for begin, end in seen:
        if begin < offset + nbytes and offset < end:
            offset = end
    return offset


def _paths(drives: Sequence[Drive]) -> tuple[Path, ...]:
    return tuple(drive.path.resolve() for drive in drives)


def addresses_without_memory(nbytes: int) -> Buffer:
    """Return addresses that nothing else has; who reads or writes there is killed (SIGSEGV)."""
    mapping = Mapping(nbytes)
    _libc.mprotect(ctypes.c_void_p(mapping.address), ctypes.c_size_t(mapping.nbytes), 0)
    return Buffer(mapping.address, nbytes, (), None, mapping)


class Window:
    """Shows parts of files, one of each drive, one after the other in one address range.

    Its pages are those of the page cache, which the kernel takes back when it needs memory. What a user writes there
    becomes memory of the process, and is lost at the next `show`. The addresses stay valid until the last tensor over
    `buffer` dies, also when the drives are closed and their files unlinked.

    Args:
        drives: in the order of the parts.
        part_nbytes: of each part, whole blocks.
        nbytes: of all of them that are used.
    """

    def __init__(self, drives: Sequence[Drive], part_nbytes: int, nbytes: int) -> None:
        self.drives = drives
        self._part_nbytes = part_nbytes
        self._mapping = Mapping(len(drives) * part_nbytes)
        self.buffer = Buffer(self._mapping.address, nbytes, (), None, self._mapping)
        self._paths = _paths(drives)
        _shown[self.buffer] = _Shown(self._paths, 0, 0)

    def show(self, offset: int) -> None:
        """Show what lies at `offset` of every drive.

        Raises:
            StorageError: the kernel refuses; a part then reads as zeros.
        """
        _shown[self.buffer] = _Shown(self._paths, offset, offset + self._part_nbytes)
        for index, drive in enumerate(self.drives):
            try:
                self._mapping.show(index * self._part_nbytes, self._part_nbytes, drive.fd, offset)
            except OSError as error:
                raise storage_error("show", drive.path, error, offset) from None

    def hide(self) -> None:
        """Show zeros."""
        self._mapping.hide(0, self._mapping.nbytes)
