"""Checkpoints with a copy of state on SSD, which comes straight from its drives.

[Note: Copying checkpoints]
``torch.save`` would read state on SSD through its windows, page by page, and write it through the page cache. Instead
it writes to a `_Writer`, which gets every storage as one range of addresses. Where this range lies in a window, its
record is read into a host slot (once, past the page cache, its checksum is compared), and from there it goes into the
file: shared with the drive if the filesystem can (a reflink: no byte is written), else written past the page cache.
So storages begin at whole blocks of the file. Memory is needed for the slots only.

Torch computes no checksums then: it would read the windows for them. `put_checksums` writes those of the slots. The
file is one of torch's own in every other respect, but for its ``serialization_id``, which torch makes of checksums.

A record that someone has written to since, or that no update has written yet, is copied from its window. So are
weights, whose checksums were compared just before.
"""

import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils.serialization import config

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.optim.state_records import StateRecord
from lightning_cxl.optim.state_visits import StateVisits
from lightning_cxl.run.zip_checksums import put_checksums
from lightning_cxl.storage.drive import BLOCK_BYTES
from lightning_cxl.storage.record_copy import RecordCopy

_AHEAD = 2  # records, besides the one that is copied

_visits: ContextVar[StateVisits | None] = ContextVar("_visits", default=None)


@contextmanager
def copying_from(visits: StateVisits) -> Iterator[None]:
    """Return a region in which `save` gets state on SSD from its drives, in this thread. Nobody updates it meanwhile.

    Raises:
        StorageError: a write has failed.
    """
    visits.wait()
    token = _visits.set(visits)
    try:
        yield
    finally:
        _visits.reset(token)


def save(checkpoint: Mapping[str, Any], file: BinaryIO, path: Path) -> None:
    """Do what ``torch.save`` does. See [Note: Copying checkpoints].

    Args:
        checkpoint: as Lightning makes it.
        file: new, open for reading and writing.
        path: of the file.

    Raises:
        OSError: the file cannot be written.
        StorageError: a drive has failed, or has damaged a record.
    """
    visits = _visits.get()
    if visits is None:
        _torch_save(checkpoint, file)
        return
    writer = _Writer(file, path, visits, _records(checkpoint, visits))
    options = {"save.storage_alignment": BLOCK_BYTES, "save.compute_crc32": False}
    with closing(writer), config.patch(options):  # type: ignore[attr-defined]
        _torch_save(checkpoint, writer)
    put_checksums(file, writer.checksums)


def _torch_save(checkpoint: Mapping[str, Any], file: Any) -> None:
    """Call ``torch.save``, and raise what the file has raised: torch then ends the file, with an error of its own."""
    try:
        torch.save(checkpoint, file)
        return
    except RuntimeError as error:
        first = error.__context__
        if not isinstance(first, (OSError, MemoryError, KeyboardInterrupt)):
            raise
    raise first.with_traceback(None)  # frames of torch would keep memory alive, as would its error as the context


def _records(checkpoint: Mapping[str, Any], visits: StateVisits) -> list[StateRecord]:
    """Return the records that a checkpoint has tensors of, in their order."""
    entries = (entry for state in checkpoint.get("optimizer_states", ()) for entry in state["state"].values())
    tensors = (value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor))
    found = (visits.find([tensor]) for tensor in tensors)
    return list(dict.fromkeys(record for record in found if isinstance(record, StateRecord)))


class _Writer:
    """A file for ``torch.save``."""

    def __init__(self, file: BinaryIO, path: Path, visits: StateVisits, records: Iterable[StateRecord]) -> None:
        self.checksums: dict[tuple[int, int], int] = {}  # by first byte in the file, and bytes
        self._file = file
        self._position = 0
        self._visits = visits
        self._coming = list(records)
        self._copy = RecordCopy(file, path)
        self._record: StateRecord | None = None  # the one in `_slot`
        self._slot: Buffer | None = None
        self._in_slot = ExitStack()

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data).cast("B")
        found = self._find(view) if view.nbytes else None
        if found is None:
            checksum = zlib.crc32(view)
            self._file.write(view)
        else:
            record, start = found
            checksum = self._copy.put(record.record, self._slot_of(record), start, view.nbytes, self._position)
        self.checksums[self._position, view.nbytes] = checksum
        self._position += view.nbytes
        return view.nbytes

    def _find(self, view: memoryview) -> tuple[StateRecord, int] | None:
        """Return the record of state of which these addresses show a part, and where the part begins in it."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            shown = torch.frombuffer(view, dtype=torch.uint8)
        record = self._visits.find([shown])
        if not isinstance(record, StateRecord) or record.is_dirty() or not record.record.is_written:
            return None
        return record, shown.data_ptr() - record.window.address

    def _slot_of(self, record: StateRecord) -> Buffer:
        if self._record is not record or self._slot is None:
            self._leave()  # first: there may be room for one record only
            self._slot = self._in_slot.enter_context(self._visits.checked(record))
            self._record = record
            if record in self._coming:
                del self._coming[: self._coming.index(record) + 1]
            self._visits.expect(self._coming[:_AHEAD])
        return self._slot

    def _leave(self) -> None:
        self._record = self._slot = None
        self._in_slot.close()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._leave()
        self._copy.close()
