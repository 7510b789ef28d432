"""Address ranges that show what lies on drives, without memory of their own."""

import weakref
from collections.abc import Sequence
from pathlib import Path

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import Mapping
from lightning_cxl.storage.drive import Drive, storage_error

_shown: weakref.WeakKeyDictionary[Buffer, tuple[Path, ...]] = weakref.WeakKeyDictionary()


def files_shown_at(address: int) -> tuple[Path, ...]:
    """Return the files that a window of this process shows at an address; empty where there is no window."""
    for buffer, paths in list(_shown.items()):
        if 0 <= address - buffer.address < buffer.nbytes:
            return paths
    return ()


class Window:
    """Shows parts of files, one of each drive, one after the other in one address range.

    Its pages are those of the page cache, which the kernel takes back when it needs memory. What a user writes there
    becomes memory of the process, and is lost at the next `show`. The addresses stay valid until the last tensor over
    `buffer` dies, also when the drives are closed and their files unlinked.

    Args:
        drives: in the order of the parts.
        part_nbytes: of each part, whole blocks.
    """

    def __init__(self, drives: Sequence[Drive], part_nbytes: int) -> None:
        self._drives = drives
        self._part_nbytes = part_nbytes
        self._mapping = Mapping(len(drives) * part_nbytes)
        self.buffer = Buffer(self._mapping.address, self._mapping.nbytes, (), None, self._mapping)
        _shown[self.buffer] = tuple(drive.path for drive in drives)

    def show(self, offset: int) -> None:
        """Show what lies at `offset` of every drive.

        Raises:
            StorageError: the kernel refuses; a part then reads as zeros.
        """
        for index, drive in enumerate(self._drives):
            try:
                self._mapping.show(index * self._part_nbytes, self._part_nbytes, drive.fd, offset)
            except OSError as error:
                raise storage_error("show", drive.path, error, offset) from None

    def hide(self) -> None:
        """Show zeros."""
        self._mapping.hide(0, self._mapping.nbytes)
