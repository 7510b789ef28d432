"""`StateVisits`: optimizer state and weights on SSD visit host memory while they are updated.

[Note: State on SSD]
State of one unit that lies on SSD is one record (`StateRecord`). Its tensors have addresses without memory; the kernel
works on the record in a host slot. One visit::

    fetch    a slot is taken, and the record is read into it; ahead of time, in the order of the step before
    update   the kernel gets the addresses of the tensors, moved by the distance between them and the slot
    write    the slot is written to the record behind what comes next

* Compute weights of a streamed unit that lie on SSD are a record, too ([Note: Weights on SSD]), and the kernel writes
  them in a slot. One visit brings all records that an update needs, and gets their slots together: two visits that each
  wait for a part of the other's slots would wait for ever.
* Slots have the exact size of their record. All of them together never have more bytes than the cap, which is at least
  what the largest visit takes. What is fetched ahead may follow a write in its slot, which nobody waits for. A visit
  that finds no slots takes those of records which are expected last, or waits for a write.
* Users see `OnSsd` in ``optimizer.state``, which refuses to be read or written. `view` maps what a record has on the
  drives: that is what ``state_dict()`` returns. Loading a state dict visits records.
* A record that was never written is not read. State that starts at zero is made zero in the slot.
* Several threads may visit different records at a time: the worker of overlapped updates, and the step itself. A
  record that is visited is not read ahead, and not visited a second time: what was read would be old.
* A slot is given back when nothing reads or writes it any more, also where a visit is interrupted: [Note: Ctrl-C].
* Errors of reads are raised by the visit, those of writes by a later visit or by `wait`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch

from lightning_cxl.errors import StorageError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.optim.record_index import RecordIndex
from lightning_cxl.optim.state_records import StateRecord, Visit
from lightning_cxl.storage.engine import StorageTransfer
from lightning_cxl.storage.slots import HostSlots, Stay, uninterrupted
from lightning_cxl.storage.store import Store
from lightning_cxl.storage.visitor import Visitor

_MAX_AHEAD = 2  # visits, besides the present one


class _Fetched(NamedTuple):
    slot: Buffer
    read: StorageTransfer | None
    """None: nothing is on the drive yet."""
    num_writes: int
    """That had begun before the read; others than visits write weights, too."""


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

    def __init__(self, store: Store, slots: HostSlots, before_write: Callable[[], None] = lambda: None) -> None:
        self.num_late = 0  # reads that were not started before their visit
        self.num_visits = 0  # of records, each by itself
        self._store = store
        self._slots = slots
        self._before_write = before_write
        self._records = RecordIndex()
        self._own: list[StateRecord] = []
        self._weights: list[Visitor] = []
        self._fetched: dict[Visitor, _Fetched] = {}  # in the order in which they are expected
        self._visited: set[Visitor] = set()
        self._writing: deque[_Written] = deque()
        self._next: dict[Visitor, tuple[Visitor, ...]] = {}  # by the first record of a visit: those of the visit after
        self._latest: Visitor | None = None
        self._changed = threading.Condition()  # guards all above

    def reserve(self, name: str, nbytes: int) -> StateRecord:
        """Return a new record of `nbytes` bytes, in which each tensor takes `taken_nbytes`.

        Raises:
            TierFullError: the store's budget is used up.
            StorageError: the drive has no room for it, or fails.
        """
        record = StateRecord(self, self._store.reserve(name, nbytes))
        self._own.append(record)
        self._records.add(record)
        return record

    def include(self, record: Visitor) -> None:
        """Let a record of weights be visited from now on."""
        self._weights.append(record)
        self._records.add(record)

    def find(self, tensors: Iterable[torch.Tensor]) -> Visitor | None:
        """Return the record in which some of the tensors lie; None where all are in memory."""
        return self._records.find(tensors)

    @uninterrupted
    def expect(self, records: Sequence[Visitor]) -> None:
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
    def visit(self, records: Sequence[Visitor]) -> Iterator[Visit]:
        """Return a region in which records are in slots; they are written behind it.

        Raises:
            StorageError: a read, or a write before, has failed.
        """
        guests = _Guests(self, records)
        try:
            guests.enter()
            guests.begin()
            yield Visit([(record.window, each.slot) for record, each in guests.fetched.items()])
            guests.write()
        finally:
            guests.leave()

    @uninterrupted
    def check(self) -> None:
        """Read all state and compare its checksums, before someone copies it.

        Raises:
            StorageError: a drive has failed, or has damaged a record.
        """
        self.wait()
        for record in self._own:
            guests = _Guests(self, [record])
            try:
                guests.enter()
            finally:
                guests.leave()

    @uninterrupted
    def view(self, record: StateRecord) -> Buffer:
        """Return memory that shows a record as it is now: pages of the page cache, until someone writes to them.

        It stays valid when the run is over. The next update of the record may change what it shows.

        Raises:
            StorageError: a write has failed.
        """
        self.wait()
        return self._store.view(record.record)

    @uninterrupted
    def wait(self) -> None:
        """Return when the drives have the state of the last update.

        Raises:
            StorageError: a write has failed, now or before: what the drives have is not whole.
        """
        for own in self._own:
            if own.blanks:
                with self.visit([own]):
                    pass
        with self._changed:
            while self._writing:
                self._finish_write()
            for record in self._records:
                if not record.record.is_whole:
                    raise record.record.not_whole()

    @uninterrupted
    def show_weights(self) -> None:
        """Return when parameters show what visits have made of them.

        Raises:
            StorageError: a write has failed.
        """
        for record in self._weights:
            if (write := record.record.last_write) is not None:
                write.wait_host()

    @uninterrupted
    def forget(self) -> None:
        """Let go of what was read ahead: records are about to change by another way than a visit.

        Raises:
            StorageError: a write has failed.
        """
        self.wait()
        with self._changed:
            while self._fetched:
                self._drop_fetched(next(reversed(self._fetched)))

    def take_records_as_they_are(self) -> None:
        """Note that records have changed: what was to be made zero in them is not."""
        for record in self._records:
            record.clean()

    @uninterrupted
    def close(self) -> None:
        """Finish all reads and writes, and let go of the slots. Idempotent.

        Raises:
            StorageError: a write has failed.
        """
        with self._changed:
            while self._fetched:
                self._drop_fetched(next(reversed(self._fetched)))
            errors = []
            while self._writing:
                try:
                    self._finish_write()
                except StorageError as error:
                    errors.append(error)
            self._slots.close()
        if errors:
            raise errors[0]

    def _following(self, first: Visitor) -> list[Visitor]:
        """Return the records of the visits that came after one the last time, by its first record."""
        found: dict[Visitor, None] = {}
        following = self._next.get(first)
        for _ in range(_MAX_AHEAD):
            if following is None or following[0] is first or following[0] in found:
                break
            found |= dict.fromkeys(following)
            following = self._next.get(following[0])
        return list(found)

    # -- with the lock -----------------------------------------------------------------------------------------------

    def _fetch(self, record: Visitor) -> bool:
        """Start reading a record if there is a slot for it; return whether there was."""
        slot = self._slots.take(record.record.padded_nbytes)
        if slot is not None:
            self._fetched[record] = self._start_read(record, slot)
            return True
        for index, (slot, write) in enumerate(self._writing if record.record.is_written else ()):
            if slot is not None and slot.nbytes == record.record.padded_nbytes:
                self._writing[index] = _Written(None, write)
                read = self._store.read(record.record, slot, after=[write])
                self._fetched[record] = _Fetched(slot, read, record.record.num_begun)
                return True
        return False

    def _fetch_now(self, records: Sequence[Visitor]) -> "dict[Visitor, _Fetched]":
        """Return slots for all records, with reads that were started; get them from whoever has some."""
        while True:
            for record in records:
                if record in self._fetched and self._fetched[record].num_writes != record.record.num_begun:
                    self._drop_fetched(record)
            missing = [record for record in records if record not in self._fetched]
            slots = self._slots.take_all([record.record.padded_nbytes for record in missing])
            if slots is not None:
                break
            others = [record for record in self._fetched if record not in records]
            if others:
                self._drop_fetched(others[-1])
            elif self._writing:
                self._finish_write()
            elif self._visited.difference(records):
                self._changed.wait()  # for another thread's visit
            else:  # slots of our own lie in the way
                self._drop_fetched(next(reversed(self._fetched)))
        for record, slot in zip(missing, slots, strict=True):
            self.num_late += record.record.is_written
            self._fetched[record] = self._start_read(record, slot)
        return {record: self._fetched.pop(record) for record in records}

    def _start_read(self, record: Visitor, slot: Buffer) -> _Fetched:
        read = self._store.read(record.record, slot) if record.record.is_written else None
        return _Fetched(slot, read, record.record.num_begun)

    def _drop_fetched(self, record: Visitor) -> None:
        """Give up what was read ahead."""
        slot, read, _ = self._fetched[record]
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


class _Guests(Stay):
    """Records of one visit, and their slots.

    Args:
        visits: whose records they are.
        records: of the visit.
    """

    def __init__(self, visits: StateVisits, records: Sequence[Visitor]) -> None:
        self.fetched: dict[Visitor, _Fetched] = {}
        """Slots, with reads that were started; what is still in here at the end is given back."""
        self._visits = visits
        self._records = records
        self._has_entered = False

    @uninterrupted
    def enter(self) -> None:
        """Wait until no other thread visits the records, which nobody reads ahead then, and bring them to slots."""
        visits = self._visits
        with visits._changed:
            while not visits._visited.isdisjoint(self._records):
                visits._changed.wait()
            visits._visited.update(self._records)
            self._has_entered = True
            self.fetched = visits._fetch_now(self._records)
        for each in self.fetched.values():
            if each.read is not None:
                each.read.wait_host()

    @uninterrupted
    def begin(self) -> None:
        """Read ahead what came after this visit the last time, and bring to the slots what the drives have not."""
        visits, first = self._visits, self._records[0]
        with visits._changed:
            visits.num_visits += len(self._records)
            if visits._latest is not None:
                visits._next[visits._latest] = tuple(self._records)
            visits._latest = first
        visits.expect(visits._following(first))
        for record, each in self.fetched.items():
            record.fill(each.slot)

    @uninterrupted
    def write(self) -> None:
        """Start writing the slots."""
        visits = self._visits
        with visits._changed:
            visits._before_write()
            for record in self._records:
                slot = self.fetched[record].slot
                visits._writing.append(_Written(slot, visits._store.write(record.record, slot)))
                del self.fetched[record]  # the slot belongs to the write, also where the next write cannot begin
                record.clean()

    def _give_back(self) -> None:
        visits = self._visits
        with visits._changed:
            for slot, read, _ in self.fetched.values():
                if read is None or read.done():
                    visits._slots.give_back(slot)
                else:
                    visits._writing.append(_Written(slot, read))
            if self._has_entered:
                visits._visited.difference_update(self._records)
                visits._changed.notify_all()
