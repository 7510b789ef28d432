"""`InputsOnSsd`: inputs of units that wait on SSD for their unit's backward.

[Note: Inputs on SSD]
An image of an input ([Note: Life of a saved input]) that belongs on SSD has a record of its own, and no memory while it
waits::

    forward    a host slot is taken; the image is copied to it from the device, like one that stays in memory
    write      the hop's thread waits for that copy and starts the write; the slot is free when the write is done
    backward   the record is read into a slot and copied to the device like weights, see [Note: Weights on SSD]

* Slots have a hard cap: a forward that is faster than the drive waits for a slot.
* A read is started when the write has begun, and the store reads behind the write. So nobody reads what was there
  before.
* Errors of a write are told to whoever reads the image, by the recompute. Nobody else needs these bytes; but who waits
  for all writes before that, for a checkpoint that refers to state, is told as well.
* Places. Records come and go with their images. A place is free for another image when the graph has let go of the
  image, and all reads and writes of its record are done. An image that nobody holds any more is not written.
* A device that computes on host memory gets a copy of the image, too: a slot must not be kept by tensors that may live
  for long.
"""

import threading
import weakref

import torch

from lightning_cxl.errors import StorageError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.storage.engine import StorageTransfer
from lightning_cxl.storage.record import Record
from lightning_cxl.storage.slots import HostSlots, Stay, uninterrupted
from lightning_cxl.storage.store import Area, Store
from lightning_cxl.streaming.fetch import Fetch
from lightning_cxl.streaming.hop import Hop
from lightning_cxl.transfer.engine import Transfer, TransferEngine

NUM_INPUT_SLOTS = 2
"""Inputs of units in memory at a time: one is copied to or from the device, one is written or read."""


class InputsOnSsd:
    """Gives images records of their own, and slots to pass through. See [Note: Inputs on SSD]."""

    def __init__(self, store: Store, area: Area, slots: HostSlots, engine: TransferEngine) -> None:
        self.store = store
        self.hop = Hop(store, slots, engine)
        self.engine = engine
        self.area = area
        self._slots = slots
        self._lock = threading.Lock()
        self.is_closed = False

    @uninterrupted
    def place(self, nbytes: int) -> "InputOnSsd":
        """Return a place for an image."""
        self.hop.check_process()  # before the lock, which a thread of the parent may have had
        with self._lock:
            record = self.area.take(nbytes)
            if self._slots.cap_bytes < record.padded_nbytes:  # sizes were not known before the first batch
                self._slots.cap_bytes = NUM_INPUT_SLOTS * record.padded_nbytes
        return InputOnSsd(self, record)

    def close(self) -> None:
        """Finish what is on its way; images can no longer be read. Idempotent."""
        self.is_closed = True
        self.hop.close()


class InputOnSsd:
    """One image. See [Note: Inputs on SSD]."""

    def __init__(self, inputs: InputsOnSsd, record: Record) -> None:
        self.record = record
        self.can_be_read = False
        """Whether its write has begun, or never will."""
        self._inputs = inputs

    def __del__(self) -> None:
        """Give the place back."""
        self._inputs.area.give_back(self.record)

    def store(self, source: torch.Tensor, lead: int) -> Transfer:
        """Start copying an image from the device, and writing it then; waits for a slot.

        Returns:
            The copy from the device.
        """
        leaving = _Leaving(self)
        beginning = _Beginning(leaving)
        try:
            slot = self._inputs.hop.send(leaving, self.record.padded_nbytes)
            image = slot.tensor((lead + source.numel(),), source.dtype)
            leaving.copy = copy = self._inputs.engine.d2h(source, image[lead:], from_here=True)
        finally:
            beginning.leave()
        return copy

    def write(self, slot: Buffer) -> StorageTransfer:
        """Start writing what is in a slot. For the hop's thread."""
        return self._inputs.store.write(self.record, slot)

    def fetch(self, destination: torch.Tensor) -> Fetch:
        """Start reading the image, and copying it to the device."""
        if self._inputs.is_closed:
            raise StorageError("an input of a unit was on tier `ssd`, and the run that had it there is over")
        return self._inputs.hop.fetch(self, destination.view(torch.uint8), [self._inputs.engine.mark()])

    def fill(self, slot: Buffer) -> None:
        """Return at once: the record has all bytes."""


class _Leaving:
    """One image on its way to a slot and to SSD; a `Trip`."""

    def __init__(self, image: InputOnSsd) -> None:
        self.slot: Buffer | None = None
        self._image = weakref.ref(image)
        self.copy: Transfer | None = None
        """From the device; None once `is_begun`: it could not be started."""
        self.is_begun = threading.Event()

    def start(self, engine: TransferEngine) -> "_Written | None":
        """Wait for the copy, and start the write; None where nobody needs it."""
        self.is_begun.wait()
        if self.copy is None:
            engine.synchronize()  # Ctrl-C may have come between the start of the copy and the note of it
            return None
        try:
            self.copy.wait_host()
            image = self._image()
            assert self.slot is not None
            return None if image is None else _Written(image.write(self.slot))
        finally:
            image = self._image()
            if image is not None:
                image.can_be_read = True

    def end(self, error: BaseException | None) -> None:
        """Let go of the slot."""
        self.copy = self.slot = None


class _Beginning(Stay):
    """Lets a trip go on: Ctrl-C may come at any place once the thread has the trip."""

    def __init__(self, leaving: _Leaving) -> None:
        self._leaving = leaving

    def _give_back(self) -> None:
        """Say that the copy from the device was started, or never will be."""
        self._leaving.is_begun.set()


class _Written:
    """A write that keeps a slot. Its error is for whoever reads the image."""

    def __init__(self, write: StorageTransfer) -> None:
        self._write = write

    def done(self) -> bool:
        """Return whether the write has ended."""
        if not self._write.done():
            return False
        self._write.wait_done()  # it has ended: this says that its error is told
        return True

    def wait_host(self) -> None:
        """Block until the write has ended."""
        self._write.wait_done()
