"""Weights and saved inputs of units on SSD: through host buffers to the device, and from it. See [Note: Swapping].

[Note: Weights on SSD]
Weights of one unit that lie on SSD are one record (`WeightRecord`). Between its uses the parameters show the record's
window, so they can be read at any time like weights in memory.

* To the device: a `Fetch` reads the record into a buffer, and copies that to the device. One whose device memory is
  wanted for something else is dropped first (`Fetch.drop`): either its copy has been started, and those started later
  come after it, or it never will be. Requesting a copy never blocks on another copy.
* An update reads and writes the record in a buffer of its own ([Note: State on SSD]), when no copy is in flight. Later
  reads run behind the write.
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
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import nn

from lightning_cxl.devices import Transfer, TransferEngine
from lightning_cxl.errors import StorageError
from lightning_cxl.memory.host_memory import aligned_nbytes, copy_bytes, has_private_pages
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.sharding.host_shard import HostShard
from lightning_cxl.storage.store import Area, Record
from lightning_cxl.storage.swap import Swapper, uninterrupted
from lightning_cxl.timing import timed
from lightning_cxl.torch_private import gather_groups, put_shard


class Fetch:
    """A copy of a record to the device, which has been requested; a job of a swapper, and a `Transfer`."""

    def __init__(
        self,
        source: "WeightRecord | InputOnSsd",
        swapper: Swapper,
        engine: TransferEngine,
        destination: torch.Tensor,
        after: list[Transfer],
    ) -> None:
        self._source = source
        self._store = swapper.store
        self._engine = engine
        self._destination: torch.Tensor | None = destination
        self._after = after
        self._copy: Transfer | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # held while the copy is started
        self._is_dropped = False
        self._is_started = threading.Event()
        try:
            swapper.submit(source.record.padded_nbytes, self)
        except BaseException:
            self.drop()  # whose destination is not kept for it
            raise

    def wait(self) -> None:  # blocks the host until the copy has been started
        self._wait_until_started()
        assert self._copy is not None, "what was dropped is waited for"
        self._copy.wait()

    def wait_host(self) -> None:  # where it was dropped: until it is known not to be started
        self._wait_until_started()
        if self._copy is not None:
            self._copy.wait_host()

    def done(self) -> bool:
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
        with timed("stall_ssd_s", "wait for a drive"):
            self._is_started.wait()
        if self._error is not None:
            raise self._error.anew() if isinstance(self._error, StorageError) else self._error


class WeightRecord:
    """The weights of one unit as one record."""

    def __init__(self, weights: "WeightsOnSsd", record: Record, window: Buffer) -> None:
        self.record = record
        self.window = self.buffer = window
        self._weights = weights

    def filling(self) -> AbstractContextManager[Buffer]:
        return self._weights.swapper.overwrite(self.record)

    def fetch(
        self, engine: TransferEngine, flat: torch.Tensor, destination: torch.Tensor, after: list[Transfer]
    ) -> Fetch:
        return Fetch(self, self._weights.swapper, self._weights.engine, destination, after)

    def wait_until_readable(self) -> None:
        pass  # it is filled before anything else

    def settle(self) -> None:
        """Return when the window shows what was written last."""
        write = self.record.last_write
        if write is not None:
            write.wait_host()

    @uninterrupted
    def begin_access(self) -> None:
        """Note that the window may be written to; write back those before it, where they are large."""
        maybe_dirty = self._weights.maybe_dirty
        maybe_dirty[self] = None
        if sum(each.window.nbytes for each in maybe_dirty) > self._weights.swapper.cap_bytes:
            for each in [each for each in maybe_dirty if each is not self]:
                each.end_access()

    @uninterrupted
    def end_access(self) -> None:
        """Write back what was written to the window, and drop its private pages. Nothing writes to it meanwhile."""
        self.begin_update()
        self.settle()  # the end of a write drops the private pages that it has in it
        if self.is_dirty():
            with self._weights.swapper.overwrite(self.record) as buffer:
                copy_bytes(self.window, buffer)

    def begin_update(self) -> None:
        # the update brings what was written to the window
        self._weights.maybe_dirty.pop(self, None)

    def is_dirty(self) -> bool:
        return has_private_pages(self.window.address, self.window.nbytes)

    def fill(self, buffer: Buffer) -> None:
        """Bring what was written to the window to a buffer; see `Swappable.fill`."""
        if self.is_dirty():
            copy_bytes(self.window, buffer)

    def clean(self) -> None:
        pass  # the kernel knows which pages are private


class WeightsOnSsd:
    """Records of weights, and the windows that may have been written to. See [Note: Weights on SSD]."""

    def __init__(self, swapper: Swapper, engine: TransferEngine) -> None:
        self.swapper = swapper
        self.store = swapper.store
        self.engine = engine
        self.maybe_dirty: dict[WeightRecord, None] = {}

    def reserve(self, name: str, nbytes: int) -> WeightRecord:
        record = self.store.reserve(name, nbytes, keeps=False)  # weights are in the files of checkpoints
        return WeightRecord(self, record, self.store.window(record))


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
        self._inputs.area.give_back(self.record)

    def store(self, source: torch.Tensor, lead: int) -> Transfer:
        """Start a copy from the device, which is returned, and the write behind it; waits for a buffer."""
        offload = _Offload(self, self._inputs, source, lead)
        self._inputs.swapper.submit(self.record.padded_nbytes, offload)
        return offload.copy()

    def fetch(self, destination: torch.Tensor) -> Fetch:
        inputs = self._inputs
        if inputs.is_closed:
            raise StorageError("an input of a unit was on tier `ssd`, and the run that had it there is over")
        into, after = destination.view(torch.uint8), [inputs.engine.mark()]
        return Fetch(self, inputs.swapper, inputs.engine, into, after)

    def wait_until_readable(self) -> None:
        """Return when the write has begun; its job has a buffer, since it came before any that reads."""
        self.write_has_begun.wait()

    def fill(self, buffer: Buffer) -> None:
        pass  # the record has all bytes


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


# `ShardsOnSsd`: shards of one unit lie on SSD, and go to the device together when FSDP2 gathers them.
#
# [Note: Shards on SSD]
# With several processes, and a device apart, each process has its shards of a unit in one record, in folders of its
# own. The record is as with one process ([Note: Weights on SSD]), and shards are as in
# [Note: Shards on the host]: what they have on the host is the record's window.
#
# * Gather. FSDP2 asks the shards of a unit one after the other. The first one brings the record to the device, through
#   a slot of the host; each takes its part, and the last one lets go of the rest. The stream in which FSDP2 puts
#   together what is gathered waits for the copy. The host waits for the read: a rank whose drive fails raises there,
#   before it has asked for the gather.
# * Ahead. A unit is read when FSDP2 asks for it, which is while the device computes the unit before: the host runs
#   ahead in a forward, and FSDP2 fetches one unit ahead in a backward. Nothing is guessed.
# * Updates read the record, and write it ([Note: State on SSD]). No read is under way then: a gather has waited for
#   its own. So nothing on the device is older than the record.
# * A user's write to a shard waits for the record's write, and goes to private pages of the window. They are written to
#   the record before it is gathered next, by the next update, or when they are many.
# * When the run is over the shards stay in the window, and are copied from there.


class ShardsOnSsd:
    """Moves shards to a record, and from there to the device. See [Note: Shards on SSD]."""

    def __init__(
        self, record: WeightRecord, engine: TransferEngine, model: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._record = record
        self._engine = engine
        self._nbytes = 0
        self._shards: list[HostShard] = []
        self._together: dict[int, frozenset[int]] = {}  # where shards begin that are gathered with the one at a key
        self._arrived: torch.Tensor | None = None
        self._awaited: set[int] = set()  # where shards begin that have not taken their part of what has arrived
        self._is_written = False
        wanted = {id(parameter) for parameter in parameters}
        moved: list[tuple[Any, HostShard, torch.Tensor]] = []
        with torch.no_grad(), self._record.filling() as memory:
            for gathered in gather_groups(model):
                group = [each for each in gathered.fsdp_params if id(each.sharded_param) in wanted]
                begins = []
                for managed in group:
                    shard: HostShard = managed.sharded_param._local_tensor
                    shard.settle()
                    filled, shown = (
                        place.tensor((shard.numel(),), shard.dtype, self._nbytes)
                        for place in (memory, self._record.buffer)
                    )
                    filled.copy_(shard.host.reshape(-1))
                    moved.append((managed, shard, shown))
                    begins.append(self._nbytes)
                    self._nbytes += aligned_nbytes(shard.host)
                self._together |= dict.fromkeys(begins, frozenset(begins))
        with torch.no_grad():
            for managed, shard, shown in moved:
                put_shard(managed, shard.lie_in(shown.view(shard.shape), self), shown)
                self._shards.append(shard)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device of the part of one shard that `host` shows; the current stream waits for it."""
        begin = host.data_ptr() - self._record.buffer.address
        if self._arrived is None or begin not in self._awaited:
            if self._is_written:
                self._record.end_access()
                self._is_written = False
            arrived = torch.empty(self._nbytes, dtype=torch.uint8, device=self._engine.device)
            shown = self._record.buffer.tensor((self._nbytes,), torch.uint8)
            self._record.fetch(self._engine, shown, arrived, [self._engine.mark()]).wait()
            self._arrived, self._awaited = arrived, set(self._together[begin])
        part = self._arrived[begin : begin + host.nbytes].view(host.dtype).view(host.shape)
        self._awaited.discard(begin)
        if not self._awaited:
            self._arrived = None
        return part

    def settle(self) -> None:
        """Return when the window shows what was written last."""
        self._record.settle()

    def written(self) -> None:
        """Write what someone has written to the window, at the next gather at the latest."""
        self._is_written = True
        self._record.begin_access()

    def close(self) -> None:
        """Let shards be copied from the window, without the record's drives. Idempotent."""
        self._arrived = None
        for shard in self._shards:
            shard.forget_drives(self)
