"""`StateVisits`: optimizer state on SSD visits host memory while it is updated.

[Note: State on SSD]
State of one unit that lies on SSD is one record (`StateRecord`). Its tensors lie in a window: they can be read at any
time, but the kernel works on a copy of the record in a host slot. One visit::

    fetch    a slot is taken, and the record is read into it; ahead of time, in the order of the step before
    update   the kernel gets the addresses of the window, moved by the distance between window and slot
    write    the slot is written to the record behind what comes next; then the window shows the new bytes

* Slots have the exact size of their record. All of them together never have more bytes than the cap, which is at least
  the largest record. What is fetched ahead may follow a write in its slot, which nobody waits for. A visit that finds
  no slot takes that of the record which is expected last, or waits for a write.
* Who writes to the tensors with torch (a loaded checkpoint, a user) writes to private pages of the window. Versions
  tell that it happened: the next visit then takes these tensors from the window, and the write drops the private pages.
  Writes through ``.data`` leave no trace and are lost.
* A record that was never written is not read. State that starts at zero is made zero in the slot.
* Several threads may visit different records at a time: the worker of overlapped updates, and the step itself. A
  record that is visited is not read ahead, and not visited a second time: what was read would be old.
* A slot is given back when nothing reads or writes it any more, also where a visit is interrupted.
* Errors of reads are raised by the visit, those of writes by a later visit or by `wait`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple, Protocol

import torch

from lightning_cxl.errors import StorageError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.optim.state_records import StateRecord, Visit, look_at
from lightning_cxl.optim.state_slots import StateSlots
from lightning_cxl.storage.engine import StorageTransfer
from lightning_cxl.storage.store import Store

_MAX_AHEAD = 2  # records, besides the one that is updated


class Visits(Protocol):
    """Says where the state of parameters is updated."""

    def find(self, tensors: Iterable[torch.Tensor]) -> StateRecord | None:
        """Return the record in which some of the tensors lie; None where all are in memory."""

    def expect(self, records: Sequence[StateRecord]) -> None:
        """Start reading records that are visited next in this order, as far as there are slots."""

    def visit(self, record: StateRecord) -> AbstractContextManager[Visit]:
        """Return a region in which a record is in a slot; the record is written behind it."""

    def touched(self, record: StateRecord) -> None:
        """Learn that someone has written to tensors of a record; it is written when they are many."""

    def wait(self) -> None:
        """Return when all windows show the state of the last update; none of it where it is encrypted."""

    def look(self) -> None:
        """Do what `wait` does, and show also what is encrypted, until it is written again."""


class NoVisits:
    """All state is in memory."""

    def find(self, tensors: Iterable[torch.Tensor]) -> StateRecord | None:
        """Return None."""
        return None

    def expect(self, records: Sequence[StateRecord]) -> None:
        """Return at once."""

    def visit(self, record: StateRecord) -> AbstractContextManager[Visit]:
        """Refuse: there is no record."""
        raise AssertionError("no state lies on SSD")

    def touched(self, record: StateRecord) -> None:
        """Return at once."""

    def wait(self) -> None:
        """Return at once."""

    def look(self) -> None:
        """Return at once."""


class _Fetched(NamedTuple):
    slot: Buffer
    read: StorageTransfer | None
    """None: nothing is on the drive yet."""


class _Written(NamedTuple):
    slot: Buffer | None
    """None: a read into it follows the write."""
    write: StorageTransfer


class StateVisits:
    """Moves records between a store and host slots. See [Note: State on SSD].

    Args:
        store: has the records.
        slots: host memory that records visit.
        before_write: called before a record is written, by any thread.
    """

    def __init__(self, store: Store, slots: StateSlots, before_write: Callable[[], None] = lambda: None) -> None:
        self.num_late = 0
        """Reads that were not started before their visit."""
        self.num_visits = 0
        self._store = store
        self._slots = slots
        self._before_write = before_write
        self._records: list[StateRecord] = []
        self._fetched: dict[StateRecord, _Fetched] = {}  # in the order in which they are expected
        self._visited: set[StateRecord] = set()
        self._writing: deque[_Written] = deque()
        self._next: dict[StateRecord, StateRecord] = {}  # what followed what
        self._latest: StateRecord | None = None
        self._touched: dict[StateRecord, None] = {}
        self._changed = threading.Condition()  # guards all above

    def reserve(self, name: str, nbytes: int) -> StateRecord:
        """Return a new record; see `StateRecord`."""
        record = StateRecord(self._store, name, nbytes)
        self._records.append(record)
        return record

    def find(self, tensors: Iterable[torch.Tensor]) -> StateRecord | None:
        """Return the record in which some of the tensors lie; None where all are in memory."""
        found = {record for tensor in tensors for record in self._records if record.holds(tensor)}
        assert len(found) <= 1, "state of one parameter lies in several records"
        return next(iter(found), None)

    def expect(self, records: Sequence[StateRecord]) -> None:
        """Start reading records that are visited next in this order, as far as there are slots."""
        with self._changed:
            while self._writing and self._writing[0].write.done():
                self._finish_write()
            for record in records:
                if record in self._fetched or record in self._visited:  # what is read now would be old soon
                    continue
                if not self._fetch(record):
                    return

    @contextmanager
    def visit(self, record: StateRecord) -> Iterator[Visit]:
        """Return a region in which a record is in a slot; the record is written behind it.

        Raises:
            StorageError: a read, or a write before, has failed.
        """
        with self._entering(record):
            slot, read = self._read(record)
            is_written = False
            try:
                with self._changed:
                    self.num_visits += 1
                    if self._latest is not None:
                        self._next[self._latest] = record
                    self._latest = record
                if read is not None:
                    read.wait_host()
                self.expect(self._following(record))
                yield record.fill(slot)
                with self._changed:
                    self._before_write()
                    self._writing.append(_Written(slot, self._store.write(record.record, slot)))
                    is_written = True
                    self._touched.pop(record, None)
                    record.clean()
            finally:
                if not is_written:
                    self._leave_slot(slot, read)

    @contextmanager
    def _entering(self, record: StateRecord) -> Iterator[None]:
        """Return a region that one thread at a time is in for a record, and in which nobody reads it ahead."""
        with self._changed:
            while record in self._visited:
                self._changed.wait()
            self._visited.add(record)
        try:
            yield
        finally:
            with self._changed:
                self._visited.remove(record)
                self._changed.notify_all()

    def check(self) -> None:
        """Read what is written and compare checksums, before someone copies what windows show.

        Raises:
            StorageError: a drive has failed, or has damaged a record.
        """
        if self._store.is_encrypted:  # what it shows has been checked, and lies in memory
            return self.look()
        self.wait()
        for record in self._records:
            with self._entering(record):
                slot, read = self._read(record)
                try:
                    if read is not None:
                        read.wait_host()
                finally:
                    self._leave_slot(slot, read)

    def touched(self, record: StateRecord) -> None:
        """Learn that someone has written to tensors of a record; it is written when they are many."""
        self._touched[record] = None
        if sum(each.record.padded_nbytes for each in self._touched) > self._slots.cap_bytes:
            self.wait()  # the end of a write drops what someone has written to the window meanwhile

    def wait(self) -> None:
        """Return when all windows show the state of the last update, and all that someone wrote to them is written.

        Raises:
            StorageError: a write has failed, now or before: what the window shows is not whole.
        """
        self._write_dirty()
        with self._changed:
            while self._writing:
                self._finish_write()
            for record in self._records:
                if not record.record.is_whole:
                    raise record.record.not_whole()

    def look(self) -> None:
        """Do what `wait` does, and show also what is encrypted, until it is written again; raises as `look_at`."""
        self.wait()
        look_at(self._records)

    def forget(self) -> None:
        """Let go of what was read ahead: records are about to change by another way than a visit.

        Raises:
            StorageError: a write has failed.
        """
        self.wait()
        with self._changed:
            while self._fetched:
                self._drop_fetched()

    def take_records_as_they_are(self) -> None:
        """Note that records have changed: what someone wrote to their windows is gone."""
        for record in self._records:
            record.clean()

    def close(self) -> None:
        """Finish all reads and writes, and let go of the slots. Idempotent.

        Raises:
            StorageError: a write has failed.
        """
        with self._changed:
            while self._fetched:
                self._drop_fetched()
            errors = []
            while self._writing:
                try:
                    self._finish_write()
                except StorageError as error:
                    errors.append(error)
            self._slots.close()
        if errors:
            raise errors[0]

    def _write_dirty(self) -> None:
        self._touched.clear()
        for record in self._records:
            if record.is_dirty:
                with self.visit(record):
                    pass

    def _following(self, record: StateRecord) -> list[StateRecord]:
        """Return the records that came after one the last time."""
        found: dict[StateRecord, None] = {}
        following = self._next.get(record)
        while following is not None and following not in (record, *found) and len(found) < _MAX_AHEAD:
            found[following] = None
            following = self._next.get(following)
        return list(found)

    def _read(self, record: StateRecord) -> _Fetched:
        with self._changed:
            return self._fetched.pop(record) if record in self._fetched else self._fetch_now(record)

    def _leave_slot(self, slot: Buffer, read: StorageTransfer | None) -> None:
        """Let go of a slot that is not written, now or when the read into it is done."""
        with self._changed:
            if read is None or read.done():
                self._slots.give_back(slot)
            else:
                self._writing.append(_Written(slot, read))
            self._changed.notify_all()

    # -- with the lock -----------------------------------------------------------------------------------------------

    def _fetch(self, record: StateRecord) -> bool:
        """Start reading a record if there is a slot for it; return whether there was."""
        slot = self._slots.take(record.record.padded_nbytes)
        if slot is not None:
            self._fetched[record] = self._start_read(record, slot)
            return True
        for index, (slot, write) in enumerate(self._writing if record.record.is_written else ()):
            if slot is not None and slot.nbytes == record.record.padded_nbytes:
                self._fetched[record] = _Fetched(slot, self._store.read(record.record, slot, after=[write]))
                self._writing[index] = _Written(None, write)
                return True
        return False

    def _fetch_now(self, record: StateRecord) -> _Fetched:
        """Start reading a record; get the slot from whoever has one."""
        self.num_late += record.record.is_written
        while (slot := self._slots.take(record.record.padded_nbytes)) is None:
            if self._fetched:
                self._drop_fetched()
            elif self._writing:
                self._finish_write()
            else:
                self._changed.wait()  # for another thread's visit
        return self._start_read(record, slot)

    def _start_read(self, record: StateRecord, slot: Buffer) -> _Fetched:
        return _Fetched(slot, self._store.read(record.record, slot) if record.record.is_written else None)

    def _drop_fetched(self) -> None:
        """Give up the record that is expected last."""
        record = next(reversed(self._fetched))
        slot, read = self._fetched[record]
        if read is not None:
            with suppress(StorageError):  # nobody needs these bytes
                read.wait_host()
        del self._fetched[record]  # only now: who is interrupted while waiting must not give the slot away
        self._slots.give_back(slot)

    def _finish_write(self) -> None:
        """Wait for the oldest write."""
        slot, write = self._writing[0]
        try:
            write.wait_host()
        finally:
            if write.done():  # else interrupted: the slot is still in use
                self._writing.popleft()
                if slot is not None:
                    self._slots.give_back(slot)
