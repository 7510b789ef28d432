"""`Hop` and `WeightRecord`: weights on SSD go to the device through host slots.

[Note: Weights on SSD]
Weights of one unit that lie on SSD are one record (`WeightRecord`). Between visits its parameters show the record's
window, so they can be read at any time like weights in memory. To the device::

    read     a host slot is taken, and the record is read into it; started at once if there is room
    copy     one thread waits for the read and starts the copy to the device: in the order in which both were asked for
    free     the slot is free when the copy is done

* Order. Copies are started in the order of their requests, all by one thread. One whose device memory is wanted for
  something else is dropped first (`Fetch.drop`): either its copy has been started, and those started later come after
  it, or it never will be.
* An update reads and writes the record in a slot of its own ([Note: State on SSD]), when no copy is under way. What is
  read afterwards is read behind the write.
* Who writes to the parameters writes to private pages of the window; the kernel knows which pages these are, also after
  writes through ``.data``. Then the window is copied instead of the record, here and by an update. The record gets
  these bytes when the code that has looked at the parameters is over, and earlier where all that was looked at would
  take more memory than the slots have. Whoever looks waits for copies and for the record's write: the end of a write
  drops the private pages.
* Who asks for a copy never waits for another one. A slot is given back when nothing reads or writes it any more, also
  where someone is interrupted: [Note: Ctrl-C].
* Errors of a read are raised where the copy is waited for; those of a write where someone looks, or at the end.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import torch

from lightning_cxl.errors import StorageError
from lightning_cxl.memory.host_tensors import copy_bytes
from lightning_cxl.memory.private_pages import has_private_pages
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.storage.engine import StorageTransfer
from lightning_cxl.storage.record import Record
from lightning_cxl.storage.slots import HostSlots, Stay, uninterrupted
from lightning_cxl.storage.store import Store
from lightning_cxl.streaming.fetch import Fetch, HasRecord, SlotKeeper, Trip
from lightning_cxl.transfer.engine import Transfer, TransferEngine


class WeightRecord:
    """The weights of one unit as one record; a `Home`, and a `Visitor` of the slots of updates."""

    can_be_read = True
    """It is filled before anything else."""

    def __init__(self, hop: "Hop", record: Record, window: Buffer) -> None:
        self.record = record
        self.window = self.buffer = window
        self._hop = hop

    @contextmanager
    def filling(self) -> Iterator[Buffer]:
        """Yield a slot, which becomes the record's bytes."""
        with self._hop.writing(self.record) as slot:
            yield slot

    def fetch(
        self, engine: TransferEngine, flat: torch.Tensor, destination: torch.Tensor, after: list[Transfer]
    ) -> Fetch:
        """Start reading, and copying then; see `Home.fetch`."""
        return self._hop.fetch(self, destination, after)

    def settle(self) -> None:
        """Return when the window shows what was written last; see `Home.settle`."""
        write = self.record.last_write
        if write is not None:
            write.wait_host()

    def looked_at(self) -> None:
        """See `Home.looked_at`."""
        self._hop.looked_at(self)

    def looks_are_over(self) -> None:
        """Write what someone has written to the window."""
        self._hop.write_back(self)

    def update_begins(self) -> None:
        """See `Home.update_begins`."""
        self._hop.forget_looks(self)

    def is_dirty(self) -> bool:
        """Return whether someone has written to the window."""
        return has_private_pages(self.window.address, self.window.nbytes)

    def fill(self, slot: Buffer) -> None:
        """Bring what someone has written to the window into a slot; see `Visitor.fill`."""
        if self.is_dirty():
            copy_bytes(self.window, slot)

    def clean(self) -> None:
        """Return at once: the kernel knows what is private."""


class Hop:
    """Brings records to the device, and writes what was written to their windows. See [Note: Weights on SSD]."""

    def __init__(self, store: Store, slots: HostSlots, engine: TransferEngine) -> None:
        self._store = store
        self._slots = slots
        self._engine = engine
        self._changed = threading.Condition()  # guards the slots, and all below
        self._waiting: deque[Fetch] = deque()  # for a slot, in order
        self._copying: deque[tuple[Buffer, SlotKeeper]] = deque()  # what keeps slots, in order
        self._queue: SimpleQueue[Trip | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._looked_at: dict[WeightRecord, None] = {}
        self._pid = os.getpid()

    def reserve(self, name: str, nbytes: int) -> WeightRecord:
        """Return a home with a record of its own, to be filled before anything else."""
        record = self._store.reserve(name, nbytes, keeps=False)  # weights are in the files of checkpoints
        return WeightRecord(self, record, self._store.window(record))

    def fetch(self, home: HasRecord, destination: torch.Tensor, after: list[Transfer]) -> Fetch:
        """Start bringing a record to the device."""
        self.check_process()
        fetch = Fetch(home, destination, after)
        try:
            self._ask(fetch)
        except BaseException:
            fetch.drop()  # whose destination is not kept for it
            raise
        return fetch

    @uninterrupted
    def _ask(self, fetch: Fetch) -> None:
        with self._changed:
            self._start_thread()
            self._free_done()
            self._queue.put(fetch)
            self._waiting.append(fetch)
            self._start_reads()

    @uninterrupted
    def send(self, trip: Trip, nbytes: int) -> Buffer:
        """Return a slot for what leaves for SSD; waits for one. The thread runs the trip in turn."""
        self.check_process()
        with self._changed:
            self._start_thread()
            trip.slot = slot = self._take_locked(nbytes)
            self._queue.put(trip)  # in the order of slots: what waits for a slot never comes before what keeps it
            return slot

    def check_process(self) -> None:
        """Refuse a forked child."""
        if os.getpid() != self._pid:
            raise StorageError("a forked child cannot fetch what is on SSD: only its parent has the thread for it")

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="lightning_cxl hop", daemon=True)
            thread.start()
            self._thread = thread

    @contextmanager
    def writing(self, record: Record) -> Iterator[Buffer]:
        """Return a region in which a slot is filled; afterwards the record has its bytes and its window shows them."""
        lent = _Lent(self, record)
        try:
            yield lent.take()
            lent.use(self._store.write)
        finally:
            lent.leave()

    @uninterrupted
    def check(self, record: Record) -> None:
        """Read a record and compare its checksum."""
        lent = _Lent(self, record)
        try:
            lent.take()
            lent.use(self._store.read)
        finally:
            lent.leave()

    @uninterrupted
    def write_back(self, home: WeightRecord) -> None:
        """Write what was written to a window, and drop its private pages. No one else writes to it meanwhile."""
        self._looked_at.pop(home, None)
        home.settle()  # the end of a write drops the private pages that it has in it
        if home.is_dirty():
            with self.writing(home.record) as slot:
                copy_bytes(home.window, slot)

    @uninterrupted
    def looked_at(self, home: WeightRecord) -> None:
        """Learn that someone may write to a window; write those that were looked at before, when they are large."""
        self._looked_at[home] = None
        if sum(each.window.nbytes for each in self._looked_at) > self._slots.cap_bytes:
            for each in [each for each in self._looked_at if each is not home]:
                self.write_back(each)

    @uninterrupted
    def close(self) -> None:
        """End the thread, and let go of the slots. Nobody asks for copies any more. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()
        with self._changed:
            while self._copying:
                self._wait_for_oldest()
        self._slots.close()

    def forget_looks(self, home: WeightRecord) -> None:
        """Learn that an update brings what someone has written to a window."""
        self._looked_at.pop(home, None)

    def _take_locked(self, nbytes: int) -> Buffer:
        while self._waiting or (slot := self._slots.take(nbytes)) is None:
            if self._waiting or not self._copying:
                self._changed.wait()
            else:
                self._wait_for_oldest()
        return slot

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        self._engine.use_in_this_thread()
        while (trip := self._queue.get()) is not None:
            self._run(trip)
            del trip  # it would keep the device's memory until the next one

    def _run(self, trip: Trip) -> None:
        copy: SlotKeeper | None = None
        error: BaseException | None = None
        try:
            self._wait_for_slot(trip)
            copy = trip.start(self._engine)
        except BaseException as caught:
            error = caught.with_traceback(None)  # its frames would keep this one, and what the trip is for
        with self._changed:
            if copy is not None and trip.slot is not None:
                self._copying.append((trip.slot, copy))
            elif trip.slot is not None:
                self._slots.give_back(trip.slot)
            self._start_reads()
            self._changed.notify_all()
        trip.end(error)

    def _wait_for_slot(self, trip: Trip) -> None:
        """Wait for copies until the oldest request has a slot, or was refused."""
        with self._changed:
            self._start_reads()
            while trip in self._waiting:
                if self._copying:
                    self._wait_for_oldest()
                else:
                    self._changed.wait()
                self._start_reads()

    # -- with the lock -----------------------------------------------------------------------------------------------

    def _start_reads(self) -> None:
        while self._waiting:
            fetch = self._waiting[0]
            if not fetch.home.can_be_read:
                return
            record = fetch.home.record
            try:
                fetch.slot = self._slots.take(record.padded_nbytes)
                if fetch.slot is None:
                    return
                fetch.read = self._store.read(record, fetch.slot)
            except Exception as error:  # for whoever waits for this copy
                fetch.refused = error
            self._waiting.popleft()

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest copy, without the lock."""
        copy = self._copying[0][1]
        self._changed.release()
        try:
            with suppress(Exception):  # for whoever waits for that copy
                copy.wait_host()
        finally:
            self._changed.acquire()
            self._free_done()

    def _free_done(self) -> None:
        while self._copying and self._copying[0][1].done():
            self._slots.give_back(self._copying.popleft()[0])


class _Lent(Stay):
    """A slot for one record, and what reads or writes it."""

    def __init__(self, hop: Hop, record: Record) -> None:
        self._hop = hop
        self._record = record
        self._slot: Buffer | None = None
        self._use: StorageTransfer | None = None

    @uninterrupted
    def take(self) -> Buffer:
        """Return the slot; waits for it behind those that wait already."""
        with self._hop._changed:
            self._slot = self._hop._take_locked(self._record.padded_nbytes)
            return self._slot

    @uninterrupted
    def use(self, start: Callable[[Record, Buffer], StorageTransfer]) -> None:
        """Read or write the slot."""
        assert self._slot is not None
        self._use = start(self._record, self._slot)
        self._use.wait_host()

    def _give_back(self) -> None:
        with self._hop._changed:
            if self._slot is not None and self._use is not None and not self._use.done():
                self._hop._copying.append((self._slot, self._use))
            elif self._slot is not None:
                self._hop._slots.give_back(self._slot)
            self._hop._changed.notify_all()
