"""`Record`: what is read and written as one, and what is known of its versions."""

from pathlib import Path

from lightning_cxl.errors import StorageError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.storage.drive import BLOCK_BYTES
from lightning_cxl.storage.engine import Piece, StorageTransfer
from lightning_cxl.storage.manifest import Entry
from lightning_cxl.storage.window import Window


class Record:
    """A named range of bytes on all drives: each drive has as much room for a part of it, the first ones fill theirs.

    A version is one place for these bytes: the same offset on every drive. The fields below `versions` belong to the
    store and change under its lock.

    Args:
        name: unique in its store.
        nbytes: that the user has.
        num_drives: how many parts it has.
        versions: offset of each version, on every drive.
        keeps: whether it is part of generations.
    """

    def __init__(
        self, name: str, nbytes: int, num_drives: int, versions: tuple[int, ...], *, keeps: bool = True
    ) -> None:
        self.name = name
        self.keeps = keeps
        self.nbytes = nbytes
        self.part_nbytes = part_nbytes(nbytes, num_drives)
        self.padded_nbytes = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        self.versions = versions
        self.entries: list[Entry | None] = [None] * len(versions)  # what was last written to each version
        self.present: int | None = None  # the version that was written last; None: none was
        self.target: int | None = None  # version of the last write that has begun
        self.num_begun = 0  # writes
        self.last_whole = 0  # the number of the last write that ended without an error
        self.last_write: StorageTransfer | None = None
        self.reads: list[StorageTransfer] = []
        self.window: Window | None = None

    @property
    def is_written(self) -> bool:
        """Whether it was ever written, or restored; also where the first write is still on its way."""
        return self.target is not None

    @property
    def is_whole(self) -> bool:
        """Whether the last write has ended without an error; True where there was none."""
        return self.last_whole == self.num_begun

    def entry(self) -> Entry | None:
        """Return what generations keep of it; None: it was never written."""
        return None if self.present is None else self.entries[self.present]

    def becomes(self, entry: Entry | None) -> None:
        """Say that its bytes are those of `entry` from now on; None: it was never written."""
        self.present = self.target = None
        if entry is not None:
            self.present, self.target = entry.version, entry.version
            self.entries[entry.version] = entry
        self.last_whole = self.num_begun
        self.show()

    def pieces(self, version: int, memory: Buffer) -> list[Piece]:
        """Return what to read or write: memory, and where its bytes lie in a version.

        Raises:
            ValueError: the memory is too small, or not page-aligned.
        """
        if memory.address % BLOCK_BYTES or memory.nbytes < self.padded_nbytes:
            raise ValueError(
                f"record `{self.name}` needs {self.padded_nbytes} bytes of page-aligned memory, got "
                f"{memory.nbytes} bytes at {memory.address:#x}"
            )
        part, nbytes, offset = self.part_nbytes, self.padded_nbytes, self.versions[version]
        starts = range(0, nbytes, part)
        return [Piece(drive, offset, memory.slice(at, min(part, nbytes - at))) for drive, at in enumerate(starts)]

    def not_whole(self) -> StorageError:
        """Return the error of whoever needs the bytes after a write that failed; it says why that did."""
        cause = self.last_write.error if self.last_write is not None else None
        message = f"record `{self.name}` is not whole, because its last write failed. Write it again, or restore it"
        if isinstance(cause, StorageError):
            return StorageError(f"{message}. What failed: {cause}", cause.path, cause.offset, cause.errno)
        return StorageError(message if cause is None else f"{message}. What failed: {cause!r}")

    def damaged(self, version: int, checksum: int, path: Path) -> StorageError:
        """Return the error of whoever has read other bytes than were written.

        Args:
            version: that was read.
            checksum: of what was read.
            path: of the first drive.
        """
        entry = self.entries[version]
        wanted = 0 if entry is None else entry.checksum
        return StorageError(
            f"record `{self.name}` is damaged: its bytes have checksum {checksum:#018x} and were written with "
            f"{wanted:#018x}. The drive may be failing, or another process has written there.",
            path=path,
            offset=self.versions[version],
        )

    def show(self) -> None:
        """Let the window show the present version; private pages are dropped."""
        if self.window is None:
            return
        entry = self.entry()
        if entry is None:
            self.window.hide()
        else:
            self.window.show(self.versions[entry.version])


def part_nbytes(nbytes: int, num_drives: int) -> int:
    """Return how many bytes each drive has for a record: whole blocks, the same on every drive."""
    return -(-nbytes // (num_drives * BLOCK_BYTES)) * BLOCK_BYTES
