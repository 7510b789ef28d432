"""Optimizer state on SSD: `StateRecord`, `OnSsd`, and `StateSwapper`, which brings records to host buffers for updates.

[Note: State on SSD]
State of one unit that lies on SSD is one record (`StateRecord`). Its tensors have addresses without memory; the kernel
works on the record in a host buffer ([Note: Swapping]). One update::

    prefetch     the record is read into a buffer, ahead of time, in the order of the step before
    update       the kernel gets the addresses of the tensors, moved by the distance between them and the buffer
    write-back   the buffer is written to the record behind what comes next

* Compute weights of a streamed unit that lie on SSD are a record, too ([Note: Weights on SSD]), and the kernel writes
  them in a buffer. One use brings all records that an update needs.
* Users see `OnSsd` in ``optimizer.state``, which refuses to be read or written. `view` maps what a record has on the
  drives: that is what ``state_dict()`` returns. Loading a state dict uses records as updates do.
* A record that was never written is not read. State that starts at zero is made zero in the buffer.
* Several threads may use different records at a time: the worker of overlapped updates, and the step itself.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.shards import sharded_like
from lightning_cxl.storage.store import Record, addresses_without_memory, is_in
from lightning_cxl.storage.swap import Swappable, Swapper, uninterrupted
from lightning_cxl.torch_private import asks_metadata, wrapper_tensor

At = Callable[[torch.Tensor], torch.Tensor]
"""Returns where the bytes of a tensor of state are now, in one dimension."""

_ALIGNMENT = 64  # bytes: a cache line, and what vectors of every element type start at


def taken_nbytes(nbytes: int) -> int:
    """Return the bytes that a tensor of `nbytes` takes of a record."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class InBuffers(NamedTuple):
    """Where the bytes of some records are while they are updated."""

    places: Sequence[tuple[Buffer, Buffer]]
    """Addresses and buffer of each."""

    def moved(self, address: int) -> int:
        """Return where the byte at an address is now: in a buffer, if the address is a record's."""
        for window, buffer in self.places:
            if is_in(window, address):
                return address - window.address + buffer.address
        return address

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a dense tensor as they are in its buffer, in one dimension; others are returned flat."""
        for window, buffer in self.places:
            if is_in(window, tensor.data_ptr()):
                return buffer.tensor((tensor.numel(),), tensor.dtype, tensor.data_ptr() - window.address)
        return tensor.as_strided((tensor.numel(),), (1,))


class StateRecord:
    """Cuts the tensors of optimizer state from one record.

    Its tensors have addresses, by which they are found in a buffer, and no memory: an access ends the process.
    """

    def __init__(self, swapper: "StateSwapper", record: Record) -> None:
        self.swapper = swapper
        self.record = record
        self.window: Buffer = addresses_without_memory(record.padded_nbytes)
        self.blanks: list[Callable[[At], None]] = []
        """Make state zero that shall start so, at the next use."""
        self._used_bytes = 0

    def take(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return a 1-D tensor of the record."""
        tensor = self.window.tensor((numel,), dtype, self._used_bytes)
        self._used_bytes += taken_nbytes(tensor.nbytes)
        return tensor

    def use(self) -> AbstractContextManager[InBuffers]:
        return self.swapper.use([self])

    @torch.no_grad()
    def fill(self, buffer: Buffer) -> None:
        """Make zero in a buffer what shall start so. Other state that was never written stays undefined."""
        for blank in self.blanks:
            blank(InBuffers([(self.window, buffer)]).flat)

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
        """Return the tensor in a view of its record, see `StateSwapper.view`."""
        offset = self.tensor.data_ptr() - self.record.window.address
        flat = view.tensor((self.tensor.numel(),), self.tensor.dtype, offset)
        plain = flat.as_strided(self.tensor.shape, self.tensor.stride())
        return plain if self._owner is None else sharded_like(plain, self._owner)

    def read(self) -> torch.Tensor:
        """Return the tensor as it is on the drive now; its memory is pages of the page cache."""
        return self.shown_in(self.record.swapper.view(self.record))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if asks_metadata(func):
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
        memo[id(self)] = copied = self.read().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
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
            value.record.swapper.verify()
        if value.record not in views:
            views[value.record] = value.record.swapper.view(value.record)
        return value.shown_in(views[value.record])

    return {key: {name: read(value) for name, value in entry.items()} for key, entry in states.items()}


class StateSwapper:
    """Brings records of state, and of weights that are updated, to host buffers. See [Note: State on SSD]."""

    def __init__(self, swapper: Swapper) -> None:
        self.swapper = swapper
        self._by_address: list[Swappable] = []  # their windows do not overlap
        self._own: list[StateRecord] = []
        self._weights: list[Swappable] = []

    def reserve(self, name: str, nbytes: int) -> StateRecord:
        """Return a new record of `nbytes` bytes, in which each tensor takes `taken_nbytes`."""
        record = StateRecord(self, self.swapper.store.reserve(name, nbytes))
        self._own.append(record)
        insort(self._by_address, record, key=_address)
        return record

    def include(self, record: Swappable) -> None:
        self._weights.append(record)
        insort(self._by_address, record, key=_address)

    def find(self, tensors: Iterable[torch.Tensor]) -> Swappable | None:
        """Return the record in which some of the tensors lie; None where all are in memory."""
        found = set()
        for address in (tensor.data_ptr() for tensor in tensors):
            index = bisect_right(self._by_address, address, key=_address) - 1
            if index >= 0 and is_in(self._by_address[index].window, address):
                found.add(self._by_address[index])
        assert len(found) <= 1, "state of one parameter lies in several records"
        return next(iter(found), None)

    @contextmanager
    def use(self, records: Sequence[Swappable]) -> Iterator[InBuffers]:
        """Return a region in which records are in buffers, which are written back when it ends."""
        with self.swapper.use(records) as buffers:
            yield InBuffers(list(zip([record.window for record in records], buffers, strict=True)))

    @uninterrupted
    def verify(self) -> None:
        """Read all state and compare its checksums, before it is copied."""
        self.wait()
        for record in self._own:
            self.swapper.verify(record.record)

    @uninterrupted
    def view(self, record: StateRecord) -> Buffer:
        """Return memory that shows a record as it is now: pages of the page cache, until something is written to them.

        It stays valid when the run is over. The next update of the record may change what it shows.
        """
        self.wait()
        return self.swapper.store.view(record.record)

    @uninterrupted
    def wait(self) -> None:
        """Return when the drives have the state of the last update."""
        for own in self._own:
            if own.blanks:
                with self.use([own]):
                    pass
        self.swapper.wait()
        for record in self._by_address:
            if not record.record.is_whole:
                raise record.record.not_whole()

    @uninterrupted
    def show_weights(self) -> None:
        """Return when parameters show what updates have made of them."""
        for record in self._weights:
            if (write := record.record.last_write) is not None:
                write.wait_host()

    @uninterrupted
    def drop_prefetched(self) -> None:
        """Let go of what was prefetched: records are about to change by another way than an update."""
        self.wait()
        self.swapper.drop_prefetched()

    def take_records_as_they_are(self) -> None:
        """Note that records have changed: what was to be made zero in them is not."""
        for record in self._by_address:
            record.clean()


def _address(record: Swappable) -> int:
    return record.window.address
