"""`Store`: records on drives, with windows, checksums, and generations that survive a crash."""

import contextlib
import ctypes
import json
import logging
import os
import secrets
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cxl.errors import CheckpointError, ConfigError, StorageError, TierFullError
from lightning_cxl.memory.resource import BlockList, Buffer
from lightning_cxl.native._numa import Mapping
from lightning_cxl.storage.drive import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    HEAD_BYTES,
    MANIFEST,
    PART,
    Drive,
    Engine,
    Folder,
    Piece,
    StorageTransfer,
    System,
    storage_error,
)
from lightning_cxl.text import format_bytes

log = logging.getLogger(__name__)

_USE_ANOTHER = "Use another folder."
WHAT_TO_DO = (
    f"{_USE_ANOTHER} A checkpoint with checkpoint='reference' needs what lies here: before you delete it, save it "
    "whole with `torch.save(lightning_cxl.plain_checkpoint(torch.load(CHECKPOINT)), NEW_FILE)`."
)

# The manifest: a small JSON file that says which versions of which records belong to a generation.

FORMAT = 2


class Entry(NamedTuple):
    version: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Generation:
    number: int  # counts up in a folder, also over runs; never used twice
    details: dict[str, Any]  # given by the caller of `commit`
    records: dict[str, Entry | None]  # None for one that was not written


@dataclass(frozen=True, slots=True)
class Manifest:
    store_id: str  # in the names of the data files
    drives: tuple[str, ...]  # their paths, for messages
    chunk_bytes: int  # checksums depend on it
    last_number: int  # of the generations so far
    records: dict[str, tuple[int, tuple[int, ...]]]  # size in bytes and offsets of the versions
    generations: tuple[Generation, ...]  # oldest first, two at most

    def encode(self) -> bytes:
        body = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return json.dumps({"format": FORMAT, "crc": zlib.crc32(body.encode()), "body": body}).encode()

    def said(self) -> str:
        return " and ".join(f"generation {each.number} {each.details}" for each in self.generations)


def decode(contents: bytes, path: Path) -> Manifest:
    try:
        outer = json.loads(contents)
        version, body = outer["format"], outer["body"]
        if version == FORMAT and zlib.crc32(body.encode()) != outer["crc"]:
            raise ValueError("its checksum does not match")
        manifest = _manifest(json.loads(body)) if version == FORMAT else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the manifest `{path}` is damaged: {error}. Without it nothing in the folder can be read: put it back "
            "from a backup, or use another folder and checkpoint='copy'. Delete this one when none refers to it"
        ) from None
    if manifest is None:
        raise CheckpointError(
            f"`{path}` has format {version}, this version of lightning_cxl reads format {FORMAT}: use the version "
            f"that wrote it, or another folder"
        )
    return manifest


def _manifest(fields: dict[str, Any]) -> Manifest:
    generations = []
    for each in fields["generations"]:
        entries = {name: None if entry is None else Entry(*entry) for name, entry in each["records"].items()}
        generations.append(Generation(each["number"], each["details"], entries))
    return Manifest(
        store_id=fields["store_id"],
        drives=tuple(fields["drives"]),
        chunk_bytes=fields["chunk_bytes"],
        last_number=fields["last_number"],
        records={name: (nbytes, tuple(offsets)) for name, (nbytes, offsets) in fields["records"].items()},
        generations=tuple(generations),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_shown: weakref.WeakKeyDictionary[Buffer, tuple[tuple[Path, ...], int, int]] = weakref.WeakKeyDictionary()
"""By window: its files, and the range of each that it shows."""


def files_shown_at(address: int) -> tuple[Path, ...]:
    """Return the files that a window of this process shows at an address; empty where no window shows files."""
    return next((paths for buffer, (paths, _, _) in list(_shown.items()) if is_in(buffer, address)), ())


def next_unseen(drives: Sequence[Drive], offset: int, nbytes: int) -> int:
    """Return the first offset from which on no window of this process shows bytes of these drives."""
    own = set(_paths(drives))
    seen = sorted((begin, end) for paths, begin, end in list(_shown.values()) if own.intersection(paths))
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

    Its pages are those of the page cache, which the kernel takes back when it needs memory. A user's writes
    become memory of the process, and are lost at the next `show`. The addresses stay valid until the last tensor over
    `buffer` dies, also when the drives are closed and their files unlinked.
    """

    def __init__(self, drives: Sequence[Drive], part_nbytes: int, nbytes: int) -> None:
        self.drives = drives
        self._part_nbytes = part_nbytes
        self._mapping = Mapping(len(drives) * part_nbytes)
        self.buffer = Buffer(self._mapping.address, nbytes, (), None, self._mapping)
        self._paths = _paths(drives)
        _shown[self.buffer] = self._paths, 0, 0

    def show(self, offset: int) -> None:
        _shown[self.buffer] = self._paths, offset, offset + self._part_nbytes
        for index, drive in enumerate(self.drives):
            try:
                self._mapping.show(index * self._part_nbytes, self._part_nbytes, drive.fd, offset)
            except OSError as error:
                raise storage_error("show", drive.path, error, offset) from None

    def hide(self) -> None:
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
        self.keeps = keeps  # whether generations have it
        self.is_reserved = False  # in this run; an earlier one may have left it
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
        """Whether it was ever written, or restored; also where the first write is still in flight."""
        return self.target is not None

    @property
    def is_whole(self) -> bool:
        """Whether the last write has ended without an error; True where there was none."""
        return self.last_whole == self.num_begun

    @property
    def end(self) -> int:
        return max(self.versions) + self.part_nbytes

    def entry(self) -> Entry | None:
        return None if self.present is None else self.entries[self.present]

    def becomes(self, entry: Entry | None) -> None:
        self.present = self.target = None
        if entry is not None:
            self.present, self.target = entry.version, entry.version
            self.entries[entry.version] = entry
        self.last_whole = self.num_begun
        self.show_in(self.window)

    def pieces(self, version: int, memory: Buffer) -> list[Piece]:
        if memory.address % BLOCK_BYTES or memory.nbytes < self.padded_nbytes:
            raise ValueError(
                f"record `{self.name}` needs {self.padded_nbytes} bytes of page-aligned memory, got "
                f"{memory.nbytes} bytes at {memory.address:#x}"
            )
        part, nbytes, offset = self.part_nbytes, self.padded_nbytes, self.versions[version]
        starts = range(0, nbytes, part)
        return [Piece(drive, offset, memory.slice(at, min(part, nbytes - at))) for drive, at in enumerate(starts)]

    def not_whole(self) -> StorageError:
        cause = self.last_write.error if self.last_write is not None else None
        message = f"record `{self.name}` is not whole, because its last write failed. Write it again, or restore it"
        if isinstance(cause, StorageError):
            return StorageError(f"{message}. What failed: {cause}", cause.path, cause.offset, cause.errno)
        return StorageError(message if cause is None else f"{message}. What failed: {cause!r}")

    def show_in(self, window: Window | None) -> None:
        """Let a window show the present version; private pages are dropped."""
        entry = self.entry()
        if window is not None and entry is None:
            window.hide()
        elif window is not None and entry is not None:
            window.show(self.versions[entry.version])


def part_nbytes(nbytes: int, num_drives: int) -> int:
    """Return how many bytes each drive has for a record: whole blocks, the same on every drive."""
    return -(-nbytes // (num_drives * BLOCK_BYTES)) * BLOCK_BYTES


def is_in(window: Buffer, address: int) -> bool:
    return 0 <= address - window.address < window.nbytes


# The store.
#
# [Note: Generations]
# With ``keeps=True`` each record has two versions, but those that shall not be kept. A version that a generation of the
# manifest names is committed and is never written: a write goes to the other one.
#
# 1. `Store.commit` waits for all writes, syncs every drive, and replaces the manifest as a whole: new file, fsync,
#    rename, fsync of the folder. The manifest then has two generations, the one before and the new one, and the caller
#    writes what belongs to the new one elsewhere, for example a checkpoint file.
# 2. `Store.settle` replaces the manifest by one with a single generation. From now on the versions that only others had
#    take writes. Between 1 and 2 a record whose two versions are both committed takes none.
#
# A crash leaves one or two generations, and all their versions are as they were written and synced. A new run chooses
# one with `restore` and lets go of the other one with `settle`. Records that it makes beside those of the earlier run
# lie behind them. Where replacing the manifest fails, nobody knows which of both files lies on the disk: versions of
# both stay protected until the next replacement succeeds.


class Store:
    """Records on one or several drives, with a folder on each; the manifest lies in the first one. Thread-safe.

    With `keeps` records have two versions, so that generations can be committed. See [Note: Generations]. A folder that
    holds a generation keeps its own `chunk_bytes`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        budget_bytes: int,
        keeps: bool = False,
        system: System | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        if len({Path(path).resolve() for path in paths}) < len(paths):
            raise ConfigError(f"each path is used once, got {', '.join(f'`{path}`' for path in paths)}")
        self._budget_bytes = budget_bytes
        self._keeps = keeps
        self._system = system or System()
        self._changes = threading.RLock()  # held while a write begins, and by all that must not miss one
        self._lock = threading.Lock()  # of fields of records; held shortly
        self._records: dict[str, Record] = {}  # also those that an earlier run has left
        self._unsynced: set[Record] = set()
        self._reserved_bytes = 0
        self._end = HEAD_BYTES  # of all records, on every drive
        self._closed = False
        self._drives: list[Drive] = []
        self._files: list[tuple[Folder, Path]] = []  # of the drives
        self._unsure: list[Generation] = []  # whose manifest may lie on the disk or not
        with contextlib.ExitStack() as stack:
            self._folders = [stack.enter_context(contextlib.closing(Folder(path, self._system))) for path in paths]
            self._folder = self._folders[0].path
            found = self._read_manifest()
            self._manifest = found or Manifest(
                secrets.token_hex(8), tuple(map(str, paths)), chunk_bytes, last_number=0, records={}, generations=()
            )
            for name, (nbytes, versions) in self._manifest.records.items():
                self._add(Record(name, nbytes, len(paths), versions))
            stack.push(self._remove_files)
            for index, folder in enumerate(self._folders):
                stack.enter_context(contextlib.closing(self._open_drive(folder, index, make=found is None)))
                folder.remove_orphans(self._manifest.store_id)
                folder.sync()  # a manifest that is there after a power loss must find its files
            self._engine = stack.enter_context(contextlib.closing(Engine(self._drives, self._manifest.chunk_bytes)))
            self._opened = stack.pop_all()

    # -- folders -------------------------------------------------------------------------------------------------------

    def _read_manifest(self) -> Manifest | None:
        contents = self._folders[0].read(MANIFEST)
        if contents is None:
            return None
        found = decode(contents, self._folder / MANIFEST)
        if not self._keeps:
            raise ConfigError(f"`{self._folder}` holds {found.said()}, and this run keeps none. {WHAT_TO_DO}")
        if len(found.drives) != len(self._folders):
            raise ConfigError(
                f"`{self._folder}` holds {found.said()} on {len(found.drives)} drives ({', '.join(found.drives)}), "
                f"and this run has {len(self._folders)}. {WHAT_TO_DO}"
            )
        return found

    def _open_drive(self, folder: Folder, index: int, make: bool) -> Drive:
        if make:
            self._check_free(folder)
        path = folder.path / f"lightning_cxl-{self._manifest.store_id}-{index}.data"
        self._files.append((folder, path))
        drive = Drive(path, self._system, make=make)
        self._drives.append(drive)
        if not self._keeps:  # so that nothing is left of a run that is killed; `close` removes what cannot go now
            with contextlib.suppress(StorageError):
                folder.remove(path)
        return drive

    def _check_free(self, folder: Folder) -> None:
        """Refuse a folder with a part of a generation, which is of another run: this one has found no manifest."""
        part, main = folder.read(PART), self._folders[0]
        is_main_of_another = folder is not main and folder.read(MANIFEST) is not None
        if part is None and not is_main_of_another:
            return
        try:
            home = folder.path if part is None else Path(json.loads(part)["home"])
        except (ValueError, KeyError, TypeError):
            home = folder.path
        if folder is not main and not is_main_of_another and home == main.path.resolve():
            return  # left by a run that was killed before its first manifest was there
        is_there = os.path.exists(home / MANIFEST)
        missing = ", which is missing: mount its drive, or put it back from a backup"
        raise ConfigError(
            f"`{folder.path}` holds a part of a generation whose manifest is `{home / MANIFEST}`"
            f"{'' if is_there else missing}. {WHAT_TO_DO if is_there else _USE_ANOTHER}"
        )

    def _mark(self, folder: Folder) -> None:
        """Note in a folder that what lies there belongs to a generation, and where that has its manifest."""
        if folder.read(PART) is None:
            part = {"store": self._manifest.store_id, "home": str(self._folder.resolve())}
            folder.write_new(PART, json.dumps(part).encode())
            folder.publish(PART)

    def _remove_files(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._manifest.generations or self._unsure:
            return
        try:
            for folder, path in self._files:
                folder.remove(path)
                folder.remove(folder.path / PART)
        except StorageError as another:
            if error is None:
                raise
            # users need the first error; the next store here removes the files
            log.warning(f"the error that ended the storage was not the only one: {another}")

    # -- records -------------------------------------------------------------------------------------------------------

    def reserve(self, name: str, nbytes: int, *, keeps: bool = True) -> Record:
        """Take space for all versions of a record; without `keeps` it is in no generation and has one version."""
        with self._changes:
            self._check_open()
            record = self._records.get(name)
            if record is not None and (record.is_reserved or not keeps):
                raise ConfigError(f"there is a record `{name}` already: names of records are unique")
            if nbytes < 1:
                raise ValueError(f"record `{name}` needs at least one byte, got {nbytes}")
            if record is not None:
                self.check_found({name: nbytes})
            else:
                part, count = part_nbytes(nbytes, len(self._drives)), 1 + (self._keeps and keeps)
                begin = next_unseen(self._drives, self._end, count * part)  # a model may show weights of an earlier run
                versions = tuple(begin + index * part for index in range(count))
                record = Record(name, nbytes, len(self._drives), versions, keeps=keeps)
            total = record.part_nbytes * len(self._drives) * len(record.versions)
            if total > (left := self._budget_bytes - self._reserved_bytes):
                raise TierFullError(
                    f"cannot place {format_bytes(total)} for `{name}` in `{self._folder}`: {format_bytes(left)} of "
                    f"{format_bytes(self._budget_bytes)} free. Raise the budget, or place less there."
                )
            for drive in self._drives:
                drive.grow(record.end)
            self._reserved_bytes += total
            record.is_reserved = True
            self._add(record)
            return record

    def _add(self, record: Record) -> None:
        self._records[record.name] = record
        self._end = max(self._end, record.end)

    def check_found(self, records: dict[str, int]) -> None:
        """Refuse a folder with a generation that lacks records of these names and bytes: it is of another run."""
        for name, nbytes in records.items() if self._manifest.generations else ():
            found = self._records.get(name)
            if found is None or found.nbytes != nbytes:
                why = f"which has no record `{name}`"
                if found is not None:
                    why = f"in which `{name}` has {found.nbytes} bytes and not {nbytes}"
                raise ConfigError(f"`{self._folder}` holds {self._manifest.said()}, {why}. {WHAT_TO_DO}")

    def window(self, record: Record) -> Buffer:
        """Return the address range that shows what was written last; zeros where nothing was.

        A user's writes are gone after the next `write` and never reach a drive. It stays valid after `close`. A drive
        that fails while someone reads ends the process (SIGBUS).
        """
        with self._lock:
            record.window = record.window or self._window(record)
            return record.window.buffer

    def view(self, record: Record) -> Buffer:
        """Return memory that shows what was written last, in pages of the page cache; zeros where nothing was.

        What is written to it becomes memory of the process. It does not follow later writes, which may change it.
        """
        with self._lock:
            return self._window(record).buffer

    def _window(self, record: Record) -> Window:
        self._check_open()
        window = Window(self._drives, record.part_nbytes, record.padded_nbytes)
        record.show_in(window)
        return window

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(drive.path.resolve() for drive in self._drives)

    def read(self, record: Record, memory: Buffer) -> StorageTransfer:
        """Start reading what was written last into page-aligned memory."""
        with self._lock:
            version, write = record.target, record.num_begun
            if version is None:
                raise StorageError(f"record `{record.name}` cannot be read: nothing was written to it")

            def check(checksum: int) -> None:
                with self._lock:
                    if record.last_whole != write:
                        raise record.not_whole()
                    entry = record.entries[version]
                    if (wanted := 0 if entry is None else entry.checksum) != checksum:
                        raise StorageError(
                            f"record `{record.name}` is damaged: its bytes have checksum {checksum:#018x} and were "
                            f"written with {wanted:#018x}. The drive may be failing, or another process has written "
                            "there.",
                            path=self._drives[0].path,
                            offset=record.versions[version],
                        )

            before = [] if record.last_write is None else [record.last_write]
            transfer = self._engine.read(record.pieces(version, memory), finish=check, after=before)
            record.reads = [*(read for read in record.reads if not read.done()), transfer]
            return transfer

    def write(self, record: Record, memory: Buffer) -> StorageTransfer:
        """Start writing a record from page-aligned memory. When that is done, its window shows the new bytes."""
        with self._changes, self._lock:
            version = self._free_version(record)
            write = record.num_begun + 1

            def end(checksum: int) -> None:
                with self._lock:
                    record.present, record.entries[version] = version, Entry(version, checksum)
                    if record.keeps:
                        self._unsynced.add(record)
                    record.show_in(record.window)
                    record.last_whole = write

            after = [*record.reads, *([] if record.last_write is None else [record.last_write])]
            transfer = self._engine.write(record.pieces(version, memory), finish=end, after=after)
            record.num_begun, record.target, record.last_write, record.reads = write, version, transfer, []
            return transfer

    # -- generations ---------------------------------------------------------------------------------------------------

    def commit(self, details: dict[str, Any]) -> int:
        """Make what was written so far a generation, with details for errors, and return its number."""
        with self._changes:
            self._check_open()
            if not self._keeps:
                raise ConfigError("this store keeps no generations: make it with `keeps=True`")
            details = json.loads(json.dumps(details))  # what cannot be kept is refused before anything is done
            if len(self._manifest.generations) > 1:
                raise StorageError(
                    f"generations {_numbers(self._manifest.generations)} are both kept: settle one of them before the "
                    "next commit"
                )
            self._engine.wait()
            for record in self._kept():
                if not record.is_whole:
                    raise record.not_whole()
            self._sync_drives()
            number = 1 + max([self._manifest.last_number, *(each.number for each in self._unsure)])
            new = Generation(number, details, {record.name: record.entry() for record in self._kept()})
            self._replace((*self._manifest.generations, new), new)
            return number

    def _kept(self) -> list[Record]:
        return [record for record in self._records.values() if record.keeps and record.is_reserved]

    def _replace(self, generations: tuple[Generation, ...], new: Generation | None = None) -> None:
        number = max([self._manifest.last_number, *(each.number for each in (*self._unsure, *generations))])
        records = {each.name: (each.nbytes, each.versions) for each in self._records.values() if each.keeps}
        manifest = replace(self._manifest, last_number=number, records=records, generations=generations)
        main, *others = self._folders
        main.write_new(MANIFEST, manifest.encode())
        for folder in others:
            self._mark(folder)
        if new is not None:
            self._unsure.append(new)
        main.publish(MANIFEST)
        self._manifest, self._unsure = manifest, []
        self._mark(main)  # if the manifest gets lost, the data must not be deleted

    def _free_version(self, record: Record) -> int:
        protecting = (*self._manifest.generations, *self._unsure)
        entries = [generation.records.get(record.name) for generation in protecting] if record.keeps else []
        committed = {entry.version for entry in entries if entry is not None}
        for version in range(len(record.versions)):
            if version not in committed:
                return version
        raise StorageError(
            f"record `{record.name}` cannot be written: all its versions belong to generations {_numbers(protecting)}"
        )

    def _get(self, number: int) -> Generation:
        for generation in self._manifest.generations:
            if generation.number == number:
                return generation
        known = ", ".join(str(each.number) for each in self._manifest.generations) or "none"
        raise CheckpointError(f"`{self._folder}` holds no generation {number}; it holds: {known}")

    def _sync_drives(self) -> None:
        for drive in self._drives:
            drive.check_name()
        try:
            for drive in self._drives:
                drive.sync()
        except StorageError:
            # the kernel says this once and may forget the bytes: a second sync would say that all is well
            with self._lock:
                for record in self._unsynced:
                    record.last_whole = -1
            raise
        self._unsynced.clear()

    def settle(self, generation: int) -> None:
        with self._changes:
            self._check_open()
            only = (self._get(generation),)
            if self._manifest.generations != only or self._unsure:
                self._replace(only)

    @property
    def found(self) -> dict[str, int]:
        """Names and bytes of the records that an earlier run has left."""
        return {name: nbytes for name, (nbytes, _) in self._manifest.records.items()}

    def generations(self) -> list[Generation]:
        """Return what could be restored, oldest first: generations of this run, and of an earlier one in the folder."""
        return list(self._manifest.generations)

    def restore(self, generation: int) -> None:
        """Make all records that are kept what they were in a generation, also those that are reserved later."""
        with self._changes:
            self._check_open()
            chosen = self._get(generation)
            missing = [record.name for record in self._kept() if record.name not in chosen.records]
            if missing:
                raise CheckpointError(f"generation {generation} in `{self._folder}` has no record `{missing[0]}`")
            with contextlib.suppress(StorageError):  # a write that failed does not matter any more
                self._engine.wait()
            with self._lock:
                for record in self._records.values():
                    if record.keeps:
                        record.becomes(chosen.records.get(record.name))

    # -- all together --------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        self._engine.wait()

    def stats(self) -> dict[str, int]:
        return {"reserved_bytes": self._reserved_bytes, "budget_bytes": self._budget_bytes, **self._engine.counts}

    def close(self) -> None:
        with self._changes:
            self._closed = True
            self._opened.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the storage in `{self._folder}` is closed")


def _numbers(generations: Sequence[Generation]) -> str:
    return " and ".join(str(each.number) for each in generations)


class Area:
    """Gives records places in space that is reserved once, and more where they need more. Not thread-safe.

    Its records have one version and belong to no generation. They are read and written by the store like all others.
    """

    def __init__(self, store: Store, name: str, nbytes: int, num_drives: int) -> None:
        self._store = store
        self._name = name
        self._num_drives = num_drives
        self._blocks = BlockList()  # of offsets on every drive
        self._num_reserved = 0
        self._left: deque[Record] = deque()  # given back; their transfers may not be done
        if nbytes:  # now, so that a full drive shows
            self._grow(nbytes)

    def take(self, nbytes: int) -> Record:
        part = part_nbytes(nbytes, self._num_drives)
        self._free(waits=False)
        while (offset := self._blocks.allocate(part, BLOCK_BYTES)) is None:
            if self._left:  # more space is taken only where waiting does not help
                self._free(waits=True)
            else:
                self._grow(nbytes)
        return Record(f"{self._name} at {offset}", nbytes, self._num_drives, (offset,), keeps=False)

    def give_back(self, record: Record) -> None:
        """Take a record's place back; nobody starts a transfer of it any more. Any thread may call this at any time."""
        self._left.append(record)

    def _free(self, *, waits: bool) -> None:
        """Free the places of records whose transfers are done; with `waits` that of the oldest one at least."""
        for _ in range(len(self._left)):
            record = self._left.popleft()
            transfers = [*record.reads, *filter(None, [record.last_write])]
            for transfer in transfers if waits else ():
                transfer.wait_done()  # nobody needs these bytes
            waits = False
            if all(transfer.done() for transfer in transfers):
                self._blocks.free(record.versions[0])
            else:
                self._left.append(record)

    def _grow(self, nbytes: int) -> None:
        self._num_reserved += 1
        space = self._store.reserve(f"{self._name} {self._num_reserved}", nbytes, keeps=False)
        self._blocks.add_range(space.versions[0], space.part_nbytes)
