"""`Record`: what is read and written as one, and what is known of its versions."""

import ctypes
import json
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cxl.errors import CheckpointError, StorageError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import Mapping
from lightning_cxl.storage.drive import BLOCK_BYTES, Drive, storage_error
from lightning_cxl.storage.engine import Piece, StorageTransfer

# ----------------------------------------------------------------------------------------------------
# The manifest: a small JSON file that says which versions of which records belong to a generation.

FORMAT = 2


class Entry(NamedTuple):
    """Where a generation has a record."""

    version: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Generation:
    """The state of all records at one commit."""

    number: int
    """Counts up in a folder, also over runs; never used twice."""
    details: dict[str, Any]
    """What the caller of `commit` gave."""
    records: dict[str, Entry | None]
    """None for one that was not written."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What lies in a folder, as far as it was committed."""

    store_id: str
    """In the names of the data files."""
    drives: tuple[str, ...]
    """Their paths, for messages."""
    chunk_bytes: int
    """Checksums depend on it."""
    last_number: int
    """Of the generations so far."""
    records: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Size in bytes and offsets of the versions."""
    generations: tuple[Generation, ...] = ()
    """Oldest first, two at most."""

    def encode(self) -> bytes:
        """Return the contents of the file."""
        body = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return json.dumps({"format": FORMAT, "crc": zlib.crc32(body.encode()), "body": body}).encode()

    def said(self) -> str:
        """Return the generations in words, for messages."""
        return " and ".join(f"generation {each.number} {each.details}" for each in self.generations)


def decode(contents: bytes, path: Path) -> Manifest:
    """Return the manifest that a file holds."""
    try:
        outer = json.loads(contents)
        version, crc, body = outer["format"], outer["crc"], outer["body"]
        damaged = version == FORMAT and zlib.crc32(body.encode()) != crc
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"it is not what a manifest looks like ({error})") from None
    if version != FORMAT:
        raise CheckpointError(
            f"`{path}` has format {version}, this version of lightning_cxl reads format {FORMAT}: use the version "
            f"that wrote it, or another folder"
        )
    if damaged:
        raise _damaged(path, "its checksum does not match")
    fields = json.loads(body)
    return Manifest(
        store_id=fields["store_id"],
        drives=tuple(fields["drives"]),
        chunk_bytes=fields["chunk_bytes"],
        last_number=fields["last_number"],
        records={name: (nbytes, tuple(offsets)) for name, (nbytes, offsets) in fields["records"].items()},
        generations=tuple(_generation(each) for each in fields["generations"]),
    )


def _generation(fields: dict[str, Any]) -> Generation:
    records = {name: None if entry is None else Entry(*entry) for name, entry in fields["records"].items()}
    return Generation(fields["number"], fields["details"], records)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the manifest `{path}` is damaged: {why}. Without it nothing in the folder can be read: put it back from a "
        f"backup, or use another folder and a checkpoint with checkpoint='copy'. Delete this one when none refers to it"
    )


# ----------------------------------------------------------------------------------------------------
# Address ranges that show what lies on drives, without memory of their own.


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
    """Return the first offset from which on no window of this process shows bytes of these drives."""
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
    """

    def __init__(self, drives: Sequence[Drive], part_nbytes: int, nbytes: int) -> None:
        self.drives = drives
        self._part_nbytes = part_nbytes
        self._mapping = Mapping(len(drives) * part_nbytes)
        self.buffer = Buffer(self._mapping.address, nbytes, (), None, self._mapping)
        self._paths = _paths(drives)
        _shown[self.buffer] = _Shown(self._paths, 0, 0)

    def show(self, offset: int) -> None:
        """Show what lies at `offset` of every drive."""
        _shown[self.buffer] = _Shown(self._paths, offset, offset + self._part_nbytes)
        for index, drive in enumerate(self.drives):
            try:
                self._mapping.show(index * self._part_nbytes, self._part_nbytes, drive.fd, offset)
            except OSError as error:
                raise storage_error("show", drive.path, error, offset) from None

    def hide(self) -> None:
        """Show zeros."""
        self._mapping.hide(0, self._mapping.nbytes)


class Record:
    """A named range of bytes on all drives: each drive has as much room for a part of it, the first ones fill theirs.

    A version is one place for these bytes: the same offset on every drive. The fields below `versions` belong to the
    store and change under its lock.
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
        """Return what to read or write: memory, and where its bytes lie in a version."""
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
        """Return the error of whoever has read other bytes than were written."""
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


def is_in(window: Buffer, address: int) -> bool:
    return 0 <= address - window.address < window.nbytes
