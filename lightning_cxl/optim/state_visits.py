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
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, Protocol

import torch

from lightning_cxl.errors import StorageError, UnsupportedError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.shards import sharded_like
from lightning_cxl.storage.engine import StorageTransfer
from lightning_cxl.storage.record import Record, Visitor, addresses_without_memory, is_in
from lightning_cxl.storage.slots import HostSlots, Stay, uninterrupted
from lightning_cxl.storage.store import Store
from lightning_cxl.torch_private import wrapper_tensor

# ----------------------------------------------------------------------------------------------------
# `RecordIndex`: in which record a tensor lies.


class RecordIndex:
    """Records by the addresses of their windows, which do not overlap."""

    def __init__(self) -> None:
        self._records: list[Visitor] = []  # in the order of their windows' addresses

    def __iter__(self) -> Iterator[Visitor]:
        return iter(self._records)

    def add(self, record: Visitor) -> None:
        """Find a record from now on."""
        insort(self._records, record, key=_address)

    def find(self, tensors: Iterable[torch.Tensor]) -> Visitor | None:
        """Return the record in which some of the tensors lie; None where all are in memory."""
        found = {record for tensor in tensors if (record := self._at(tensor.data_ptr())) is not None}
        assert len(found) <= 1, "state of one parameter lies in several records"
        return next(iter(found), None)

    def _at(self, address: int) -> Visitor | None:
        index = bisect_right(self._records, address, key=_address) - 1
        record = self._records[index] if index >= 0 else None
        return record if record is not None and is_in(record.window, address) else None


def _address(record: Visitor) -> int:
    return record.window.address


# ----------------------------------------------------------------------------------------------------
# `StateRecord`: optimizer state that lies on SSD and is read and written as one; `OnSsd`: what users see of it.

At = Callable[[torch.Tensor], torch.Tensor]
"""Returns where the bytes of a tensor of state are now, in one dimension."""

_ALIGNMENT = 64  # bytes: a cache line, and what vectors of every element type start at
_METADATA = frozenset(("device", "dim", "dtype", "is_floating_point", "is_meta", "layout", "ndim", "nelement", "numel"))
_METADATA |= {"requires_grad", "shape", "size"}


def taken_nbytes(nbytes: int) -> int:
    """Return the bytes that a tensor of `nbytes` takes of a record."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Visit(NamedTuple):
    """Where the bytes of some records are while they are updated."""

    places: Sequence[tuple[Buffer, Buffer]]
    """Addresses and slot of each."""

    def moved(self, address: int) -> int:
        """Return where the byte at an address is now: in a slot, if the address is a record's."""
        for window, slot in self.places:
            if is_in(window, address):
                return address - window.address + slot.address
        return address

    def at_slot(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a dense tensor as they are in the slot, in one dimension; others are returned flat."""
        for window, slot in self.places:
            if is_in(window, tensor.data_ptr()):
                part = slot.slice(tensor.data_ptr() - window.address, tensor.nbytes)
                return part.tensor((tensor.numel(),), tensor.dtype)
        return tensor.as_strided((tensor.numel(),), (1,))


class StateRecord:
    """Cuts the tensors of optimizer state from one record.

    Its tensors have addresses, by which they are found in a slot, and no memory: an access ends the process.
    """

    def __init__(self, visits: "StateVisits", record: Record) -> None:
        self.visits = visits
        self.record = record
        self.window: Buffer = addresses_without_memory(record.padded_nbytes)
        self.blanks: list[Callable[[At], None]] = []
        """Make state zero that shall start so, at the next visit."""
        self._used_bytes = 0

    def take(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return a 1-D tensor of the record."""
        nbytes = numel * dtype.itemsize
        tensor = self.window.slice(self._used_bytes, nbytes).tensor((numel,), dtype)
        self._used_bytes += taken_nbytes(nbytes)
        return tensor

    def visit(self) -> AbstractContextManager[Visit]:
        """Return a region in which the record is in a slot; it is written behind it."""
        return self.visits.visit([self])

    @torch.no_grad()
    def fill(self, slot: Buffer) -> None:
        """Make zero in a slot what shall start so. Other state that was never written stays undefined."""
        for blank in self.blanks:
            blank(Visit([(self.window, slot)]).at_slot)

    def clean(self) -> None:
        """Note that the record is written as `fill` has left it."""
        self.blanks.clear()


class OnSsd(torch.Tensor):
    """Stands in ``optimizer.state`` for a tensor that lies on SSD: knows its shape, and refuses everything else.

    A copy or a pickle of it is an ordinary tensor in memory.
    """

    record: StateRecord
    tensor: torch.Tensor
    _owner: torch.Tensor | None

    @staticmethod
    def of(record: StateRecord, tensor: torch.Tensor, owner: torch.Tensor | None = None) -> "OnSsd":
        """Return what stands for a tensor of a record.

        Args:
            owner: that the tensor is cut like, over processes; None where it is whole.
        """
        shape = tensor.shape if owner is None else owner.shape
        shown: OnSsd = wrapper_tensor(OnSsd, shape, tensor.dtype, torch.device("cpu"))
        shown.record, shown.tensor, shown._owner = record, tensor, owner
        return shown

    def reference(self) -> dict[str, Any]:
        """Return where the tensor lies, without its bytes: record, offset, dtype, shape and stride."""
        return {
            "lightning_cxl_record": self.record.record.name,
            "offset": self.tensor.data_ptr() - self.record.window.address,
            "dtype": str(self.tensor.dtype).removeprefix("torch."),
            "shape": list(self.tensor.shape),
            "stride": list(self.tensor.stride()),
        }

    def shown_in(self, view: Buffer) -> torch.Tensor:
        """Return the tensor in a view of its record, see `StateVisits.view`."""
        part = view.slice(self.tensor.data_ptr() - self.record.window.address, self.tensor.nbytes)
        flat = part.tensor((self.tensor.numel(),), self.tensor.dtype)
        plain = flat.as_strided(self.tensor.shape, self.tensor.stride())
        return plain if self._owner is None else sharded_like(plain, self._owner)

    def read(self) -> torch.Tensor:
        """Return the tensor as it is on the drive now; its memory is pages of the page cache."""
        return self.shown_in(self.record.visits.view(self.record))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(getattr(func, "__self__", func), "__name__", "") in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return cls.__torch_dispatch__(func, types, (), {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
        raise UnsupportedError(
            "this state lies on tier `ssd` and is no tensor in memory: `optimizer.state_dict()` reads it, and "
            "`optimizer.load_state_dict()` writes it"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self.tensor.dtype} {tuple(self.shape)} on tier `ssd`: read it with `optimizer.state_dict()`>"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a tensor in memory."""
        memo[id(self)] = copied = self.read().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def read_states(
    states: Mapping[Any, Mapping[str, Any]], *, compares_checksums: bool = True
) -> dict[Any, dict[str, Any]]:
    """Return state of parameters with tensors in the place of `OnSsd`, whose memory is pages of the page cache."""
    views: dict[StateRecord, Buffer] = {}

    def read(value: Any) -> Any:
        if not isinstance(value, OnSsd):
            return value
        if compares_checksums and not views:
            value.record.visits.check()
        if value.record not in views:
            views[value.record] = value.record.visits.view(value.record)
        return value.shown_in(views[value.record])

    return {key: {name: read(value) for name, value in entry.items()} for key, entry in states.items()}


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
    """Moves records between a store and host slots. See [Note: State on SSD]."""

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
        """Return a new record of `nbytes` bytes, in which each tensor takes `taken_nbytes`."""
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
        """Return a region in which records are in slots; they are written behind it."""
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
        """Read all state and compare its checksums, before someone copies it."""
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
        """
        self.wait()
        return self._store.view(record.record)

    @uninterrupted
    def wait(self) -> None:
        """Return when the drives have the state of the last update."""
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
        """Return when parameters show what visits have made of them."""
        for record in self._weights:
            if (write := record.record.last_write) is not None:
                write.wait_host()

    @uninterrupted
    def forget(self) -> None:
        """Let go of what was read ahead: records are about to change by another way than a visit."""
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
        """Finish all reads and writes, and let go of the slots. Idempotent."""
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
    """Records of one visit, and their slots."""

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


# ----------------------------------------------------------------------------------------------------
# `Visits`: where optimizer state and weights are updated, as the optimizer sees it. See [Note: State on SSD].


class Visits(Protocol):
    """Says where state and weights are updated."""

    def find(self, tensors: Iterable[torch.Tensor]) -> Visitor | None:
        """Return the record in which some of the tensors lie; None where all are in memory."""

    def expect(self, records: Sequence[Visitor]) -> None:
        """Start reading records that are visited next in this order, as far as there are slots."""

    def visit(self, records: Sequence[Visitor]) -> AbstractContextManager[Visit]:
        """Return a region in which records are in slots; they are written behind it."""

    def wait(self) -> None:
        """Return when the drives have the state of the last update."""

    def check(self) -> None:
        """Read all state and compare its checksums."""

    def view(self, record: StateRecord) -> Buffer:
        """Return memory that shows a record as it is now."""

    def show_weights(self) -> None:
        """Return when parameters show what visits have made of them."""


class NoVisits:
    """All state and all weights are in memory."""

    def find(self, tensors: Iterable[torch.Tensor]) -> Visitor | None:
        return None

    def expect(self, records: Sequence[Visitor]) -> None:
        """Return at once."""

    def visit(self, records: Sequence[Visitor]) -> AbstractContextManager[Visit]:
        """Refuse: there is no record."""
        raise AssertionError("nothing lies on SSD")

    def wait(self) -> None:
        """Return at once."""

    def check(self) -> None:
        """Return at once."""

    def view(self, record: StateRecord) -> Buffer:
        """Refuse: there is no record."""
        raise AssertionError("nothing lies on SSD")

    def show_weights(self) -> None:
        """Return at once."""
