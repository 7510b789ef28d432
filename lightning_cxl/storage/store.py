"""`Store`: records on drives, with windows, checksums, and generations that survive a crash."""

import contextlib
import json
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_cxl.errors import CheckpointError, ConfigError, StorageError, TierFullError
from lightning_cxl.memory.resource import BlockList, Buffer
from lightning_cxl.storage.drive import BLOCK_BYTES, HEAD_BYTES
from lightning_cxl.storage.engine import CHUNK_BYTES, Engine, StorageTransfer
from lightning_cxl.storage.generations import Generations, Places
from lightning_cxl.storage.record import Entry, Generation, Record, Window, next_unseen, part_nbytes
from lightning_cxl.storage.system import System
from lightning_cxl.units import format_bytes


class Store:
    """Records on one or several drives. Thread-safe.

    Args:
        keeps: whether records have two versions, so that generations can be committed. See [Note: Generations].
        chunk_bytes: of one read or write; a folder that holds a generation keeps its own.
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
        if chunk_bytes < 1 or chunk_bytes % BLOCK_BYTES:
            raise ValueError(f"chunk_bytes must be a multiple of {BLOCK_BYTES}, got {chunk_bytes}")
        self._budget_bytes = budget_bytes
        self._keeps = keeps
        self._changes = threading.RLock()  # held while a write begins, and by all that must not miss one
        self._lock = threading.Lock()  # of fields of records; held shortly
        self._records: dict[str, Record] = {}
        self._unsynced: weakref.WeakSet[Record] = weakref.WeakSet()  # some records come and go
        self._reserved_bytes = 0
        self._restored: Generation | None = None
        self._closed = False
        with contextlib.ExitStack() as stack:
            self._places = Places(paths, keeps=keeps, system=system or System())
            stack.callback(self._places.close)
            found = self._places.found
            self._drives = self._places.drives
            chunk_bytes = found.chunk_bytes if found else chunk_bytes
            self._generations = Generations(self._places, chunk_bytes)
            self._end = HEAD_BYTES
            for nbytes, versions in self._generations.found_records.values():
                self._end = max(self._end, max(versions) + part_nbytes(nbytes, len(self._drives)))
            self._engine = Engine(self._drives, chunk_bytes)
            stack.callback(self._engine.close)
            self._opened = stack.pop_all()

    # -- records -------------------------------------------------------------------------------------------------------

    def reserve(self, name: str, nbytes: int, *, keeps: bool = True) -> Record:
        """Take space for all versions of a record.

        Args:
            keeps: whether it is part of generations, in a store that keeps some. Else it has one version, and nothing
                of it is there after a crash.
        """
        with self._changes:
            self._check_open()
            if name in self._records:
                raise ConfigError(f"there is a record `{name}` already: names of records are unique")
            if nbytes < 1:
                raise ValueError(f"record `{name}` needs at least one byte, got {nbytes}")
            part = part_nbytes(nbytes, len(self._drives))
            versions = self._generations.found_versions(name, nbytes) if keeps else ()
            if not versions:
                count = 1 + (self._keeps and keeps)  # not where a model still shows weights of an earlier run
                self._end = next_unseen(self._drives, self._end, count * part)
                versions = tuple(self._end + index * part for index in range(count))
            total = part * len(self._drives) * len(versions)
            self._check_budget(name, total)
            end = max(versions) + part
            for drive in self._drives:
                drive.grow(end)
            self._end = max(self._end, end)
            self._reserved_bytes += total
            record = self._records[name] = Record(name, nbytes, len(self._drives), versions, keeps=keeps)
            if keeps and self._restored is not None and name in self._restored.records:
                record.becomes(self._restored.records[name])
            return record

    def check_found(self, records: Mapping[str, int]) -> None:
        """Refuse a folder with a generation that lacks records of these names and bytes: it is of another run."""
        self._generations.check_found(records)

    def _check_budget(self, name: str, nbytes: int) -> None:
        if nbytes > (left := self._budget_bytes - self._reserved_bytes):
            raise TierFullError(
                f"cannot place {format_bytes(nbytes)} for `{name}` in `{self._places.home.path}`: {format_bytes(left)} "
                f"of {format_bytes(self._budget_bytes)} free. Raise the budget, or place less there."
            )

    def window(self, record: Record) -> Buffer:
        """Return the address range that shows what was written last; zeros where nothing was.

        It takes no memory but the page cache. What a user writes there is gone after the next `write` and never
        reaches a drive. It stays valid after `close`. A drive that fails while someone reads ends the process (SIGBUS).
        """
        with self._lock:
            if record.window is None:
                self._check_open()
                try:
                    record.window = Window(self._drives, record.part_nbytes, record.padded_nbytes)
                    record.show()
                except BaseException:
                    record.window = None
                    raise
            return record.window.buffer

    def view(self, record: Record) -> Buffer:
        """Return memory that shows what was written last, in pages of the page cache; zeros where nothing was.

        What is written to it becomes memory of the process. It does not follow later writes, which may change it.
        """
        with self._lock:
            self._check_open()
            window = Window(self._drives, record.part_nbytes, record.padded_nbytes)
            entry = record.entry()
            if entry is not None:
                window.show(record.versions[entry.version])
            return window.buffer

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with the records, one on each drive."""
        return tuple(drive.path.resolve() for drive in self._drives)

    def read(self, record: Record, memory: Buffer, *, after: Sequence[StorageTransfer] = ()) -> StorageTransfer:
        """Start reading what was written last, also where that write is still on its way.

        Args:
            memory: page-aligned, at least `record.padded_nbytes`; nobody may use it before the transfer is done.
            after: transfers that use the memory until then; begins when they are done, with or without an error.
        """
        with self._lock:
            version, write = record.target, record.num_begun
            if version is None:
                raise StorageError(f"record `{record.name}` cannot be read: nothing was written to it")

            def check(checksum: int) -> None:
                with self._lock:
                    if record.last_whole != write:
                        raise record.not_whole()
                    entry = record.entries[version]
                    if entry is None or entry.checksum != checksum:
                        raise record.damaged(version, checksum, self._drives[0].path)

            before = [*after, *([] if record.last_write is None else [record.last_write])]
            transfer = self._engine.read(record.pieces(version, memory), finish=check, after=before)
            record.reads = [*(read for read in record.reads if not read.done()), transfer]
            return transfer

    def write(self, record: Record, memory: Buffer) -> StorageTransfer:
        """Start writing a record. When that is done, its window shows the new bytes.

        Args:
            memory: page-aligned, at least `record.padded_nbytes`; nobody may change it before the transfer is done.
        """
        with self._changes, self._lock:
            version = self._generations.free_version(record)
            write = record.num_begun + 1

            def end(checksum: int) -> None:
                with self._lock:
                    record.present, record.entries[version] = version, Entry(version, checksum)
                    self._unsynced.add(record)
                    record.show()
                    record.last_whole = write

            after = [*record.reads, *([] if record.last_write is None else [record.last_write])]
            transfer = self._engine.write(record.pieces(version, memory), finish=end, after=after)
            record.num_begun, record.target, record.last_write, record.reads = write, version, transfer, []
            return transfer

    # -- generations ---------------------------------------------------------------------------------------------------

    def commit(self, details: dict[str, Any]) -> int:
        """Make what was written so far a generation, beside the one before. See [Note: Generations].

        Args:
            details: kept with the generation, as JSON, and shown to users in errors.

        Returns:
            The number of the generation.
        """
        with self._changes:
            self._check_open()
            if not self._keeps:
                raise ConfigError("this store keeps no generations: make it with `keeps=True`")
            details = json.loads(json.dumps(details))  # what cannot be kept is refused before anything is done
            self._generations.check_room()
            self._engine.wait()
            for record in self._kept():
                if not record.is_whole:
                    raise record.not_whole()
            self._sync_drives()
            return self._generations.add(details, self._kept())

    def _kept(self) -> list[Record]:
        return [record for record in self._records.values() if record.keeps]

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
        """Let go of all generations but one. See [Note: Generations]."""
        with self._changes:
            self._check_open()
            self._generations.keep_only(self._generations.get(generation), self._kept())

    @property
    def found(self) -> dict[str, int]:
        """Bytes of the records that an earlier run left, by name."""
        return {name: nbytes for name, (nbytes, _) in self._generations.found_records.items()}

    def generations(self) -> list[Generation]:
        """Return what could be restored, oldest first: generations of this run, and of an earlier one in the folder."""
        return list(self._generations.kept)

    def restore(self, generation: int) -> None:
        """Make all records that are kept what they were in a generation, also those that are reserved later."""
        with self._changes:
            self._check_open()
            chosen = self._generations.get(generation)
            kept = self._kept()
            missing = [record.name for record in kept if record.name not in chosen.records]
            if missing:
                raise CheckpointError(
                    f"generation {generation} in `{self._places.home.path}` has no record `{missing[0]}`"
                )
            with contextlib.suppress(StorageError):  # a write that failed does not matter any more
                self._engine.wait()
            with self._lock:
                for record in kept:
                    record.becomes(chosen.records[record.name])
            self._restored = chosen

    # -- all together --------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Block until all transfers started so far are done."""
        self._engine.wait()

    def stats(self) -> dict[str, int]:
        """Return bytes reserved, of the budget, read and written; and system calls that read and wrote."""
        return {"reserved_bytes": self._reserved_bytes, "budget_bytes": self._budget_bytes, **self._engine.counts}

    def close(self) -> None:
        """Finish all transfers and close everything; files stay where a generation is kept. Idempotent."""
        with self._changes:
            self._closed = True
            self._opened.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"the storage in `{self._places.home.path}` is closed")


# ----------------------------------------------------------------------------------------------------
# `Area`: space on the drives of a store for records that come and go.


class Area:
    """Gives records places in space that is reserved once, and more where they need more. Not thread-safe.

    Its records have one version and belong to no generation. They are read and written by the store like all others.

    Args:
        nbytes: reserved now, so that a full drive shows; 0: nothing yet.
    """

    def __init__(self, store: Store, name: str, nbytes: int, num_drives: int) -> None:
        self._store = store
        self._name = name
        self._num_drives = num_drives
        self._blocks = BlockList()  # of offsets on every drive
        self._num_reserved = 0
        self._last_range = 0
        self._end = 0  # of the last range
        self._left: deque[Record] = deque()  # given back; their transfers may not be done
        if nbytes:
            self._grow(nbytes)

    def take(self, nbytes: int) -> Record:
        """Return a record to which nothing was written."""
        part = part_nbytes(nbytes, self._num_drives)
        self._free(waits=False)
        while (offset := self._blocks.allocate(part, BLOCK_BYTES, lowest=True)) is None:
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
        begin = space.versions[0]
        if begin == self._end:
            self._blocks.extend_range(self._last_range, space.part_nbytes)
        else:
            self._blocks.add_range(begin, space.part_nbytes)
            self._last_range = begin
        self._end = begin + space.part_nbytes
