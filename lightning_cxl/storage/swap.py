"""`Swapper`: brings records to host buffers, and writes them back.

[Note: Swapping]
A swapper has one piece of host memory with a hard cap, and cuts buffers of exact sizes from it. Optimizer state,
weights and saved inputs have a swapper each. A buffer is used in one of two ways:

* `use`. The caller works in it: on state, on weights that are updated. The record has been prefetched, if the one used
  before it was so the last time, or is read now; its write-back runs behind what the caller does next.
* `submit`. A job has it, in a thread of the swapper, from its first transfer to its last: from the drive to the device,
  or from the device to the drive.

Rules:

* Requests get buffers in their order. A use gets all its buffers together: two uses that each wait for a part of the
  other's would wait for ever. Where there is no room, a request waits for transfers in flight; if there are none,
  records that were prefetched are evicted, those expected last first.
* A buffer is free when no transfer reads or writes it any more. The thread that ends the transfer frees it, and starts
  the next prefetch.
* No thread waits for a transfer, or begins a write, while it holds the lock: a commit delays writes until all end.
* A record in use is not prefetched, and not used a second time: what was read would be old. Where something else has
  written it since it was prefetched, it is read again.
* Errors of reads are raised by the use; those of write-backs by a later use, by `wait` or by `close`.

[Note: Ctrl-C]
Python raises ``KeyboardInterrupt`` in the main thread, between any two bytecodes: a buffer may have been taken and not
be noted yet. So in calls that change buffers, lists and records (`uninterrupted`) Ctrl-C counts when they have
returned. They wait for transfers in flight, and for uses of the same records by other threads. Where that takes too
long (a drive hangs), a second Ctrl-C counts at once, and may lose a buffer. The buffers of a region of code belong to
an object that is made before any is taken. They are given back when the region ends, and if Ctrl-C comes just before
that, when the object dies.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from queue import SimpleQueue
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from lightning_cxl.errors import StorageError
from lightning_cxl.memory.resource import BlockList, Buffer
from lightning_cxl.storage.drive import BLOCK_BYTES, StorageTransfer
from lightning_cxl.storage.store import Record, Store

_P = ParamSpec("_P")
_T = TypeVar("_T")


def uninterrupted(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that the first Ctrl-C does not interrupt; it counts afterwards. See [Note: Ctrl-C]."""

    @wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _T:
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return function(*args, **options)
        came: list[int] = []  # without frames, which would keep what they hold
        signal.signal(signal.SIGINT, lambda number, frame: handler(number, frame) if came else came.append(number))
        try:
            return function(*args, **options)
        finally:
            signal.signal(signal.SIGINT, handler)
            if came:
                handler(came[0], None)

    return call


class BufferPool:
    """Cuts buffers of exact sizes from one piece of memory. Not thread-safe.

    `allocate` gives page-aligned memory. `cap_bytes` is of all buffers together; a larger request gets as much as it
    needs, while there are no other buffers.
    """

    def __init__(self, allocate: Callable[[int], Buffer], cap_bytes: int) -> None:
        self._allocate = allocate
        self.cap_bytes = cap_bytes
        self.num_taken = 0
        self._memory: Buffer | None = None
        self._blocks = BlockList()

    def take(self, sizes: Sequence[int], *, allocates: bool = True) -> list[Buffer] | None:
        """Return buffers of these sizes, whole blocks; None, and no buffer, while there is no room for all of them."""
        needed = sum(sizes)
        if self._memory is None or needed > self._memory.nbytes:
            if self.num_taken or not allocates:
                return None
            self.close()
            self.cap_bytes = max(self.cap_bytes, needed)
            self._memory = self._allocate(self.cap_bytes)
            self._blocks.add_range(self._memory.address, self._memory.nbytes)
        addresses: list[int] = []
        for nbytes in sizes:
            address = self._blocks.allocate(nbytes, BLOCK_BYTES)
            if address is None:
                for taken in addresses:
                    self._blocks.free(taken)
                return None
            addresses.append(address)
        self.num_taken += len(addresses)
        start = self._memory.address
        return [self._memory.slice(at - start, nbytes) for at, nbytes in zip(addresses, sizes, strict=True)]

    def give_back(self, buffer: Buffer) -> None:
        self._blocks.free(buffer.address)
        self.num_taken -= 1

    def close(self) -> None:
        """Let go of the memory; all buffers have been given back. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._blocks.drop_range(memory.address)


class Swappable(Protocol):
    """A record with bytes that its drives may not have yet."""

    record: Record
    window: Buffer  # the addresses by which tensors of the record are found in a buffer

    def fill(self, buffer: Buffer) -> None:
        """Bring what is newer than the drives to a buffer, which has what is on the drives."""

    def clean(self) -> None:
        """Note that the record is written as `fill` has left the buffer."""


class BufferJob(Protocol):
    """Work of a thread of the swapper with one buffer, which is free when `run` returns or raises."""

    def run(self, buffer: Buffer) -> None: ...

    def failed(self, error: BaseException) -> None:
        """Learn why there was no buffer, or what `run` has raised."""


class _Held(NamedTuple):
    buffer: Buffer
    read: StorageTransfer | None  # None: nothing is on the drive yet, or it is not needed
    num_writes: int  # that had begun before the read


_MAX_THREADS = 16  # of jobs: each has a buffer, and there are few, but where images are small


class Swapper:
    """Brings records to buffers and writes them back. Thread-safe. See [Note: Swapping].

    `before_write` is called before the write-backs of a use, `begin_thread` first in each thread that runs jobs.
    """

    def __init__(
        self,
        store: Store,
        pool: BufferPool,
        *,
        before_write: Callable[[], None] = lambda: None,
        begin_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_late = 0  # reads of records that were not expected before their use
        self.store = store
        self._pool = pool
        self._before_write = before_write
        self._begin_thread = begin_thread
        self._pid = os.getpid()
        self._jobs: SimpleQueue[tuple[int, BufferJob] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._turn = threading.Lock()  # of the thread that waits for a job and its buffer
        self._changed = threading.Condition()  # guards all below, and the pool
        self._waiting: deque[object] = deque()  # who waits for buffers, in order
        self._expected: deque[Record] = deque()  # to be prefetched once there is room
        self._prefetched: dict[Record, _Held] = {}  # in the order in which they are expected
        self._in_use: set[Record] = set()
        self._num_in_flight = 0  # transfers at whose end a buffer is free
        self._errors: deque[BaseException] = deque()  # of write-backs
        self._next: dict[Record, tuple[Record, ...]] = {}  # by the first record of a use: those of the use after
        self._latest: Record | None = None

    # -- use in host memory --------------------------------------------------------------------------------------------

    @uninterrupted
    def expect(self, records: Sequence[Record]) -> None:
        """Prefetch records that are used next, in this order, as far as there is room, and then as there is."""
        with self._changed:
            if records:
                self._expected = deque(records)
            self._prefetch()

    @contextmanager
    def use(self, entries: Sequence[Swappable]) -> Iterator[list[Buffer]]:
        """Return a region in which records are in buffers, which are written back when it ends without an error."""
        lease = _Use(self, [each.record for each in entries])
        try:
            lease.take()
            lease.begin(entries)
            yield lease.buffers()
            lease.write_back(entries)
        finally:
            lease.end()

    @contextmanager
    def overwrite(self, record: Record) -> Iterator[Buffer]:
        """Return a region in which a buffer is filled; when it ends, the record has been written with its bytes."""
        lease = _Use(self, [record])
        try:
            lease.take(reads=False)
            yield lease.buffers()[0]
            lease.write_now()
        finally:
            lease.end()

    @uninterrupted
    def verify(self, record: Record) -> None:
        lease = _Use(self, [record])
        try:
            lease.take()
        finally:
            lease.end()

    @uninterrupted
    def wait(self) -> None:
        with self._changed:
            while self._num_in_flight:
                self._changed.wait()
            self._check()

    @uninterrupted
    def drop_prefetched(self) -> None:
        """Evict what was prefetched: records are about to change in another way."""
        with self._changed:
            self._expected.clear()
            while self._prefetched:
                self._evict(next(reversed(self._prefetched)))
            while self._num_in_flight:
                self._changed.wait()

    # -- jobs ----------------------------------------------------------------------------------------------------------

    @uninterrupted
    def submit(self, nbytes: int, job: BufferJob) -> None:
        """Run a job in a thread of the swapper once there is a buffer for it; jobs get buffers in this order."""
        self.check_process()
        with self._changed:
            if len(self._threads) < _MAX_THREADS:
                thread = threading.Thread(target=self._work, name=f"swap {len(self._threads)}", daemon=True)
                thread.start()
                self._threads.append(thread)
        self._jobs.put((nbytes, job))

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StorageError("a forked child cannot fetch what is on SSD: only its parent has the threads for it")

    def _work(self) -> None:
        self._begin_thread()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        buffer: Buffer | None = None
        with self._turn:
            request = self._jobs.get()
            if request is None:
                return False
            nbytes, job = request
            del request
            try:
                with self._changed:
                    (buffer,) = self._take(lambda: [nbytes])
            except BaseException as error:
                job.failed(error.with_traceback(None))  # its frames would keep this one, and what the job is for
                return True
        try:
            job.run(buffer)
        except BaseException as error:
            job.failed(error.with_traceback(None))
        finally:
            with self._changed:
                self._free(buffer)
        return True

    @uninterrupted
    def raise_cap(self, nbytes: int) -> None:
        """Let all buffers together have at least `nbytes`, from the next time on that none is in use."""
        with self._changed:
            self._pool.cap_bytes = max(self._pool.cap_bytes, nbytes)

    @property
    def cap_bytes(self) -> int:
        return self._pool.cap_bytes

    @uninterrupted
    def close(self) -> None:
        """Finish all jobs and transfers, end the threads, and let go of the memory. Idempotent."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join()
        with self._changed:
            self.drop_prefetched()
            self._pool.close()
            errors, self._errors = self._errors, deque()
        if errors:
            raise _anew(errors[0])

    # -- with the lock -------------------------------------------------------------------------------------------------

    def _take_for(self, records: Sequence[Record], reads: bool) -> dict[Record, _Held]:
        missing: list[Record] = []

        def sizes() -> list[int]:
            for record in records:
                if record in self._prefetched and self._prefetched[record].num_writes != record.num_begun:
                    self._evict(record)
            missing[:] = [record for record in records if record not in self._prefetched]
            return [record.padded_nbytes for record in missing]

        buffers = self._take(sizes, records)
        for record, buffer in zip(missing, buffers, strict=True):
            self.num_late += reads and record.is_written and record not in self._expected
            self._prefetched[record] = self._start_read(record, buffer) if reads else _Held(buffer, None, 0)
        self._expected = deque(record for record in self._expected if record not in records)
        return {record: self._prefetched.pop(record) for record in records}

    def _take(self, sizes: Callable[[], list[int]], records: Sequence[Record] = ()) -> list[Buffer]:
        """Return buffers, behind those who wait for some already; evicts what was prefetched, `records` last."""
        ticket = object()
        self._waiting.append(ticket)
        try:
            while True:
                if self._waiting[0] is ticket:
                    if (buffers := self._pool.take(sizes())) is not None:
                        return buffers
                    evictable = [record for record in self._prefetched if record not in records]
                    if self._pool.num_taken == len(self._prefetched):  # else some are in use, and come back
                        evictable = evictable or list(self._prefetched)
                    if evictable and not self._num_in_flight:
                        self._evict(evictable[-1])
                        continue
                self._changed.wait()
        finally:
            self._waiting.remove(ticket)
            self._changed.notify_all()

    def _evict(self, record: Record) -> None:
        buffer, read, _ = self._prefetched.pop(record)
        self._free_after(buffer, read)

    def _prefetch(self, *, allocates: bool = True) -> None:
        while self._expected and not self._waiting:
            record = self._expected[0]
            if record not in self._prefetched and record not in self._in_use:  # what is read now would be old soon
                buffers = self._pool.take([record.padded_nbytes], allocates=allocates)
                if buffers is None:
                    return
                try:
                    self._prefetched[record] = self._start_read(record, buffers[0])
                except StorageError:  # raised by the use, which reads it then
                    self._pool.give_back(buffers[0])
            self._expected.popleft()

    def _start_read(self, record: Record, buffer: Buffer) -> _Held:
        return _Held(buffer, self.store.read(record, buffer) if record.is_written else None, record.num_begun)

    def _free_after(self, buffer: Buffer, transfer: StorageTransfer | None, *, notes_error: bool = False) -> None:
        if transfer is None:
            self._free(buffer)
            return

        def ended() -> None:
            transfer.wait_done()  # it is done: this says that its error is known
            with self._changed:
                self._num_in_flight -= 1
                if notes_error and transfer.error is not None:
                    self._errors.append(transfer.error)
                self._free(buffer)

        self._num_in_flight += 1
        transfer.add_done_callback(ended)

    def _free(self, buffer: Buffer) -> None:
        self._pool.give_back(buffer)
        self._prefetch(allocates=False)  # this may be a thread of a drive
        self._changed.notify_all()

    def _check(self) -> None:
        if self._errors:
            raise _anew(self._errors.popleft())

    def _learn(self, records: Sequence[Record]) -> list[Record]:
        """Note that these are used now; return those that were used after them the last time."""
        first = records[0]
        if self._latest is not None:
            self._next[self._latest] = tuple(records)
        self._latest = first
        found: dict[Record, None] = {}
        following = self._next.get(first)
        while following is not None and following[0] is not first and following[0] not in found:
            found |= dict.fromkeys(following)
            following = self._next.get(following[0])
        return list(found)


class _Use:
    """Records in use together, and their buffers. See [Note: Ctrl-C]."""

    def __init__(self, swapper: Swapper, records: Sequence[Record]) -> None:
        self._held: dict[Record, _Held] = {}
        self._swapper = swapper
        self._records = records
        self._has_begun = False

    def buffers(self) -> list[Buffer]:
        return [self._held[record].buffer for record in self._records]

    @uninterrupted
    def take(self, *, reads: bool = True) -> None:
        swapper = self._swapper
        with swapper._changed:
            while not swapper._in_use.isdisjoint(self._records):
                swapper._changed.wait()
            swapper._check()
            swapper._in_use.update(self._records)
            self._has_begun = True
            self._held = swapper._take_for(self._records, reads)
        for each in self._held.values():
            if each.read is not None:
                each.read.wait_host()

    @uninterrupted
    def begin(self, entries: Sequence[Swappable]) -> None:
        with self._swapper._changed:
            following = self._swapper._learn(self._records)
        self._swapper.expect(following)
        for each in entries:
            each.fill(self._held[each.record].buffer)

    @uninterrupted
    def write_back(self, entries: Sequence[Swappable]) -> None:
        self._swapper._before_write()
        for each in entries:
            self._write(each.record, notes_error=True)
            each.clean()

    @uninterrupted
    def write_now(self) -> None:
        for record in self._records:
            self._write(record, notes_error=False).wait_host()

    def _write(self, record: Record, notes_error: bool) -> StorageTransfer:
        buffer = self._held[record].buffer
        write = self._swapper.store.write(record, buffer)
        del self._held[record]  # the buffer belongs to the write, also where the next write cannot begin
        with self._swapper._changed:
            self._swapper._free_after(buffer, write, notes_error=notes_error)
        return write

    @uninterrupted
    def end(self) -> None:
        """Give back what is held. Idempotent."""
        self.__class__ = _Ended  # type: ignore[assignment]  # without a finaliser: Python ignores Ctrl-C in one
        swapper = self._swapper
        with swapper._changed:
            if self._has_begun:
                swapper._in_use.difference_update(self._records)
            for buffer, read, _ in self._held.values():
                swapper._free_after(buffer, read)
            swapper._prefetch(allocates=False)
            swapper._changed.notify_all()

    __del__ = end


class _Ended:
    def end(self) -> None: ...


def _anew(error: BaseException) -> BaseException:
    return error.anew() if isinstance(error, StorageError) else error
