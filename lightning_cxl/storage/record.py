"""`Record`: what is read and written as one, and what is known of its versions."""

from lightning_cxl.storage.drive import BLOCK_BYTES
from lightning_cxl.storage.engine import StorageTransfer
from lightning_cxl.storage.window import Window


class Record:
    """A named range of bytes on all drives: each drive holds an equally large part of it.

    A version is one place for these bytes: the same offset on every drive. The fields below `versions` belong to the
    store and change under its lock.

    Args:
        name: unique in its store.
        nbytes: that the user has.
        num_drives: how many parts it has.
        versions: offset of each version, on every drive.
    """

    def __init__(self, name: str, nbytes: int, num_drives: int, versions: tuple[int, ...]) -> None:
        self.name = name
        self.nbytes = nbytes
        self.part_nbytes = part_nbytes(nbytes, num_drives)
        self.padded_nbytes = self.part_nbytes * num_drives
        self.versions = versions
        self.crcs: list[int | None] = [None] * len(versions)
        self.present: int | None = None  # the version that was written last; None: none was
        self.target: int | None = None  # the version that the last write that has begun goes to
        self.num_begun = 0  # writes
        self.last_whole = 0  # the number of the last write that ended without an error
        self.last_write: StorageTransfer | None = None
        self.reads: list[StorageTransfer] = []
        self.window: Window | None = None

    @property
    def is_written(self) -> bool:
        """Whether it was ever written, or restored."""
        return self.present is not None

    @property
    def is_whole(self) -> bool:
        """Whether the last write has ended without an error; True where there was none."""
        return self.last_whole == self.num_begun

    def committed(self) -> tuple[int, int] | None:
        """Return present version and CRC, as a generation keeps them; None: it was never written."""
        crc = None if self.present is None else self.crcs[self.present]
        return None if self.present is None or crc is None else (self.present, crc)

    def becomes(self, version: int | None, crc: int | None) -> None:
        """Say that `version` holds its bytes from now on, with this CRC; None: it was never written."""
        self.present = self.target = version
        if version is not None:
            self.crcs[version] = crc
        self.last_whole = self.num_begun
        self.show()

    def show(self) -> None:
        """Let the window show the present version; private pages of it are dropped."""
        if self.window is None:
            return
        if self.present is None:
            self.window.hide()
        else:
            self.window.show(self.versions[self.present])


def part_nbytes(nbytes: int, num_drives: int) -> int:
    """Return how many bytes of a record each drive holds: whole blocks, the same on every drive."""
    return -(-nbytes // (num_drives * BLOCK_BYTES)) * BLOCK_BYTES
