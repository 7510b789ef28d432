"""Weights and saved inputs of units on SSD: through host buffers to the device, and from it. See [Note: Swapping].

[Note: Weights on SSD]
Weights of one unit that lie on SSD are one record (`WeightRecord`). Between its uses the parameters show the record's
window, so they can be read at any time like weights in memory.

* To the device: a `Fetch` reads the record into a buffer, and copies that to the device. One whose device memory is
  wanted for something else is dropped first (`Fetch.drop`): either its copy has been started, and those started later
  come after it, or it never will be. Requesting a copy never blocks on another copy.
* An update reads and writes the record in a buffer of its own ([Note: State on SSD]), when no copy is under way. What
  is read afterwards is read behind the write.
* Writes to the parameters go to private pages of the window; the kernel knows which pages these are, also after writes
  through ``.data``. Then the window is copied instead of the record, here and by an update. The record gets these bytes
  when the code that may have written is over, and earlier where all such windows would take more memory than the
  buffers. Before a window is written back, the record's last write has ended: that drops the private pages.
* Errors of a read are raised where the copy is waited for; those of a write where parameters are read, or at the end.

[Note: Inputs on SSD]
An image of an input ([Note: Life of a saved input]) that belongs on SSD has a record of its own, and no memory while it
waits::

    forward    a job gets a buffer, copies the image to it from the device, and writes the record
    backward   the record is read into a buffer and copied to the device, as weights are

* Buffers have a hard cap: a forward that is faster than the drive waits for a buffer.
* A read is started when the write has begun, and the store reads behind the write. So what was there before is never
  read.
* Errors of a write are raised by the recompute that reads the image; nothing else needs these bytes. But a checkpoint
  that refers to state waits for all writes, and raises them, too.
* Places. Records come and go with their images. A place is free for another image when the graph has let go of the
  image, and all reads and writes of its record are done. An image that is not needed any more is not written.
* A device that computes on host memory gets a copy of the image, too: a buffer must not be kept by tensors that may
  live for long.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from lightning_cxl.errors import StorageError
from lightning_cxl.memory.host_tensors import copy_bytes
from lightning_cxl.memory.private_pages import has_private_pages
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.storage.record import Record
from lightning_cxl.storage.store import Area, Store
from lightning_cxl.storage.swap import Swapper, uninterrupted
from lightning_cxl.transfer.engine import Transfer, TransferEngine

# ----------------------------------------------------------------------------------------------------


class _Source(Protocol):
    """What is fetched: weights, or an image of an input."""

    @property
    def record(self) -> Record: ...

    def wait_until_readable(self) -> None:
        """Return when the write of what is to be read has begun."""

    def fill(self, buffer: Buffer) -> None:
        """Bring bytes that are not in the record to a buffer that it was read into."""


class Fetch:
    """A copy of a record to the device; a job of a swapper, and a `Transfer`."""

    def __init__(
        self, source: _Source, store: Store, engine: TransferEngine, destination: torch.Tensor, after: list[Transfer]
    ) -> None:
        self._source = source
        self._store = store
        self._engine = engine
        self._destination: torch.Tensor | None = destination
        self._after = after
        self._copy: Transfer | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # held while the copy is started
        self._is_dropped = False
        self._is_started = threading.Event()

    def submit(self, swapper: Swapper) -> "Fetch":
        try:
            swapper.submit(self._source.record.padded_nbytes, self)
        except BaseException:
            self.drop()  # whose destination is not kept for it
            raise
        return self

    def wait(self) -> None:
        """Let device work queued from here on run after the copy; blocks the host until the copy has been started."""
        self._wait_until_started()
        assert self._copy is not None, "what was dropped is waited for"
        self._copy.wait()

    def wait_host(self) -> None:
        """Block until the copy is done, or where it was dropped, until it is known not to be started."""
        self._wait_until_started()
        if self._copy is not None:
            self._copy.wait_host()

    def done(self) -> bool:
        """Return whether the copy is done or has failed."""
        return self._is_started.is_set() and (self._copy is None or self._copy.done())

    def drop(self) -> None:
        """Let no copy be started from now on; one that has been started goes on."""
        with self._lock:
            self._is_dropped = True

    def run(self, buffer: Buffer) -> None:
        """Read, and start the copy; the buffer is free when it is done."""
        self._source.wait_until_readable()
        self._store.read(self._source.record, buffer).wait_host()
        if not self._is_dropped:
            self._source.fill(buffer)
        with self._lock:
            if not self._is_dropped and self._destination is not None:
                image = buffer.tensor((self._destination.numel(),), torch.uint8)
                self._copy = self._engine.h2d(image, self._destination, after=self._after)
        self._end()
        if self._copy is not None:
            with suppress(Exception):  # raised by `wait_host`
                self._copy.wait_host()

    def failed(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._destination, self._after = None, []
        self._is_started.set()

    def _wait_until_started(self) -> None:
        self._is_started.wait()
        if self._error is not None:
            raise self._error.anew() if isinstance(self._error, StorageError) else self._error


# ----------------------------------------------------------------------------------------------------


class WeightRecord:
    """The weights of one unit as one record; a `Home`, and `Swappable` for updates."""

    def __init__(self, weights: "WeightsOnSsd", record: Record, window: Buffer) -> None:
        self.record = record
        self.window = self.buffer = window
        self._weights = weights

    @contextmanager
    def filling(self) -> Iterator[Buffer]:
        """Yield a buffer, which becomes the record's bytes."""
        with self._weights.swapper.overwrite(self.record) as buffer:
            yield buffer

    def fetch(
        self, engine: TransferEngine, flat: torch.Tensor, destination: torch.Tensor, after: list[Transfer]
    ) -> Fetch:
        """Start reading, and copying then; see `Home.fetch`."""
        weights = self._weights
        return Fetch(self, weights.store, weights.engine, destination, after).submit(weights.swapper)

    def wait_until_readable(self) -> None:
        """Return at once: it is filled before anything else."""

    def settle(self) -> None:
        """Return when the window shows what was written last; see `Home.settle`."""
        write = self.record.last_write
        if write is not None:
            write.wait_host()

    def looked_at(self) -> None:
        """See `Home.looked_at`."""
        self._weights.may_be_written(self)

    def looks_are_over(self) -> None:
        """Write what was written to the window; see `Home.looks_are_over`."""
        self._weights.write_back(self)

    def update_begins(self) -> None:
        """See `Home.update_begins`."""
        self._weights.forget(self)

    def is_dirty(self) -> bool:
        """Return whether the window was written to."""
        return has_private_pages(self.window.address, self.window.nbytes)

    def fill(self, buffer: Buffer) -> None:
        """Bring what was written to the window to a buffer; see `Swappable.fill`."""
        if self.is_dirty():
            copy_bytes(self.window, buffer)

    def clean(self) -> None:
        """Return at once: the kernel knows what is private."""


class WeightsOnSsd:
    """Records of weights, and the windows that may have been written to. See [Note: Weights on SSD]."""

    def __init__(self, swapper: Swapper, engine: TransferEngine) -> None:
        self.swapper = swapper
        self.store = swapper.store
        self.engine = engine
        self._lock = threading.RLock()
        self._maybe_dirty: dict[WeightRecord, None] = {}

    def reserve(self, name: str, nbytes: int) -> WeightRecord:
        """Return a home with a record of its own, to be filled before anything else."""
        record = self.store.reserve(name, nbytes, keeps=False)  # weights are in the files of checkpoints
        return WeightRecord(self, record, self.store.window(record))

    @uninterrupted
    def may_be_written(self, home: WeightRecord) -> None:
        """Learn that a window may be written to from now on; write back those before it, where they are large."""
        self._maybe_dirty[home] = None
        if sum(each.window.nbytes for each in self._maybe_dirty) > self.swapper.cap_bytes:
            for each in [each for each in self._maybe_dirty if each is not home]:
                self.write_back(each)

    @uninterrupted
    def write_back(self, home: WeightRecord) -> None:
        """Write what was written to a window, and drop its private pages. Nothing else writes to it meanwhile."""
        self.forget(home)
        home.settle()  # the end of a write drops the private pages that it has in it
        if home.is_dirty():
            with self.swapper.overwrite(home.record) as buffer:
                copy_bytes(home.window, buffer)

    def forget(self, home: WeightRecord) -> None:
        """Learn that an update brings what was written to a window."""
        self._maybe_dirty.pop(home, None)


# ----------------------------------------------------------------------------------------------------

NUM_INPUT_SLOTS = 2
"""Inputs of units in memory at a time: one is copied to or from the device, one is written or read."""


class InputsOnSsd:
    """Gives images records of their own. See [Note: Inputs on SSD]."""

    def __init__(self, swapper: Swapper, area: Area, engine: TransferEngine) -> None:
        self.swapper = swapper
        self.engine = engine
        self.area = area
        self.is_closed = False
        self._lock = threading.Lock()

    @uninterrupted
    def place(self, nbytes: int) -> "InputOnSsd":
        """Return a place for an image."""
        self.swapper.check_process()  # before the lock, which a thread of the parent may have had
        with self._lock:
            record = self.area.take(nbytes)
        if self.swapper.cap_bytes < record.padded_nbytes:  # sizes were not known before the first batch
            self.swapper.raise_cap(NUM_INPUT_SLOTS * record.padded_nbytes)
        return InputOnSsd(self, record)

    def close(self) -> None:
        """Finish what is on its way; images can no longer be read. Idempotent."""
        self.is_closed = True
        self.swapper.close()


class InputOnSsd:
    """One image. See [Note: Inputs on SSD]."""

    def __init__(self, inputs: InputsOnSsd, record: Record) -> None:
        self.record = record
        self.write_has_begun = threading.Event()  # or never will
        self._inputs = inputs

    def __del__(self) -> None:
        """Give the place back."""
        self._inputs.area.give_back(self.record)

    def store(self, source: torch.Tensor, lead: int) -> Transfer:
        """Start copying an image from the device, and writing it then; waits for a buffer.

        Returns:
            The copy from the device.
        """
        offload = _Offload(self, self._inputs, source, lead)
        self._inputs.swapper.submit(self.record.padded_nbytes, offload)
        return offload.copy()

    def fetch(self, destination: torch.Tensor) -> Fetch:
        """Start reading the image, and copying it to the device."""
        inputs = self._inputs
        if inputs.is_closed:
            raise StorageError("an input of a unit was on tier `ssd`, and the run that had it there is over")
        into, after = destination.view(torch.uint8), [inputs.engine.mark()]
        return Fetch(self, inputs.swapper.store, inputs.engine, into, after).submit(inputs.swapper)

    def wait_until_readable(self) -> None:
        """Return when the write has begun; its job has a buffer, since it came before any that reads."""
        self.write_has_begun.wait()

    def fill(self, buffer: Buffer) -> None:
        """Return at once: the record has all bytes."""


class _Offload:
    """One image on its way from the device to SSD; a job of a swapper."""

    def __init__(self, image: InputOnSsd, inputs: InputsOnSsd, source: torch.Tensor, lead: int) -> None:
        self._image = weakref.ref(image)
        self._inputs = inputs
        self._source: torch.Tensor | None = source
        self._lead = lead
        self._after = [inputs.engine.mark()]
        self._copy: Transfer | None = None
        self._error: BaseException | None = None
        self._is_started = threading.Event()

    def copy(self) -> Transfer:
        """Return the copy from the device; waits until it has been started."""
        self._is_started.wait()
        if self._copy is None:
            error, self._error = self._error, None  # its frames refer to this
            assert error is not None
            raise error
        return self._copy

    def run(self, buffer: Buffer) -> None:
        source, self._source = self._source, None
        assert source is not None
        host = buffer.tensor((self._lead + source.numel(),), source.dtype)
        self._copy = copy = self._inputs.engine.d2h(source, host[self._lead :], after=self._after)
        del source
        self._is_started.set()
        copy.wait_host()
        image = self._image()
        if image is None:  # nothing needs it any more
            return
        write = self._inputs.swapper.store.write(image.record, buffer)
        image.write_has_begun.set()
        del image
        write.wait_done()  # its error is raised where the image is read

    def failed(self, error: BaseException) -> None:
        self._error = error
        self._source = None
        self._is_started.set()
        image = self._image()
        if image is not None:
            image.write_has_begun.set()
