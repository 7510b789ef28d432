"""`StateRecord`: optimizer state that lies on SSD and is read and written as one; its tensors lie in a window."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.storage.record import Record
from lightning_cxl.storage.store import Store
from lightning_cxl.storage.visitor import is_in

At = Callable[[torch.Tensor], torch.Tensor]
"""Returns where the bytes of a tensor of state are now, in one dimension."""

_ALIGNMENT = 64  # bytes: a cache line, and what vectors of every element type start at


def taken_nbytes(nbytes: int) -> int:
    """Return the bytes that a tensor of `nbytes` takes of a record."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Visit(NamedTuple):
    """Where the bytes of some records are while they are updated."""

    places: Sequence[tuple[Buffer, Buffer]]
    """Window and slot of each."""

    def moved(self, address: int) -> int:
        """Return where the byte at an address is now: in a slot, if it is in a window."""
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
    """Cuts the tensors of optimizer state from one record's window, and knows whether someone wrote to them.

    Args:
        store: has the record.
        name: of the record.
        nbytes: of all tensors, each counted by `taken_nbytes`.

    Raises:
        TierFullError: the store's budget is used up.
        StorageError: the drive has no room for it, or fails.
    """

    def __init__(self, store: Store, name: str, nbytes: int) -> None:
        self._store = store
        self.record: Record = store.reserve(name, nbytes)
        self.window: Buffer = store.window(self.record)
        self.blanks: list[Callable[[At], None]] = []
        """Make state zero that shall start so, at the next visit."""
        self._used_bytes = 0
        self._tensors: list[torch.Tensor] = []
        self._shown: list[torch.Tensor] = []  # how users see each of them
        self._versions: list[tuple[int, int]] = []  # of the tensors, and of what users see

    def take(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return a 1-D tensor of the window."""
        nbytes = numel * dtype.itemsize
        tensor = self.window.slice(self._used_bytes, nbytes).tensor((numel,), dtype)
        self._used_bytes += taken_nbytes(nbytes)
        self._tensors.append(tensor)
        self._shown.append(tensor)
        self._versions.append((tensor._version, tensor._version))
        return tensor

    def show_as(self, tensor: torch.Tensor, shown: torch.Tensor) -> None:
        """Learn as what users see a tensor: a DTensor counts what they write by itself. See [Note: Shards].

        Args:
            tensor: that begins where one of `take` does.
            shown: what users see from now on.
        """
        index = next(index for index, each in enumerate(self._tensors) if each.data_ptr() == tensor.data_ptr())
        self._shown[index] = shown
        self._versions[index] = (self._versions[index][0], shown._version)

    @torch.no_grad()
    def fill(self, slot: Buffer) -> None:
        """Bring what is newer than the drive, or was never there, into a slot; see `Visitor.fill`.

        State that nobody has asked for yet stays as undefined as new memory is. Of the window only those tensors count
        that someone wrote to.
        """
        at_slot = Visit([(self.window, slot)]).at_slot
        for tensor in self._written():
            at_slot(tensor).copy_(tensor)
        for blank in self.blanks:
            blank(at_slot)

    def is_dirty(self) -> bool:
        """Whether someone wrote to a tensor since `clean`, in a way that counts up its version, or shall find zeros."""
        return bool(self.blanks or self._written())

    def clean(self) -> None:
        """Note that the record has what the tensors show, or has newer bytes than they do."""
        self._versions = self._versions_now()
        self.blanks.clear()

    def _written(self) -> list[torch.Tensor]:
        """Return the tensors that someone wrote to since `clean`."""
        both = zip(self._tensors, self._versions, self._versions_now(), strict=True)
        return [tensor for tensor, before, now in both if before != now]

    def _versions_now(self) -> list[tuple[int, int]]:
        pairs = zip(self._tensors, self._shown, strict=True)
        return [(tensor._version, shown._version) for tensor, shown in pairs]
