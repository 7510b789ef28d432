"""`StateRecord`: optimizer state that lies on SSD and is read and written as one; `OnSsd`: what users see of it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.shards import sharded_like
from lightning_cxl.storage.record import Record
from lightning_cxl.storage.visitor import is_in
from lightning_cxl.storage.window import addresses_without_memory

if TYPE_CHECKING:
    from lightning_cxl.optim.state_visits import StateVisits

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

    Args:
        visits: bring it to slots.
        record: the bytes.

    Raises:
        TierFullError: there are no addresses left.
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
            record: has the tensor.
            tensor: by its address.
            owner: that the tensor is cut like, over processes; None where it is whole.
        """
        shape = tensor.shape if owner is None else owner.shape
        shown: OnSsd = torch.Tensor._make_wrapper_subclass(OnSsd, shape, dtype=tensor.dtype)
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
        """Return the tensor as it is on the drive now; its memory is pages of the page cache.

        Raises:
            StorageError: a write has failed, or the run is over.
        """
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
    """Return state of parameters with tensors in the place of `OnSsd`, whose memory is pages of the page cache.

    Args:
        states: by whatever key.
        compares_checksums: of all records first.

    Raises:
        StorageError: a drive has failed, or has damaged a record.
    """
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
