"""`Visitor`: a record whose tensors have addresses, and whose bytes visit host slots."""

from typing import Protocol

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.storage.record import Record


class Visitor(Protocol):
    """A record and the addresses of its tensors, as those see it who bring it to a slot and write it back."""

    record: Record
    window: Buffer

    def fill(self, slot: Buffer) -> None:
        """Bring what is newer than the drives into a slot, which is at least as large and has what is on the drives."""

    def clean(self) -> None:
        """Note that the record is written as `fill` has left the slot."""


def is_in(window: Buffer, address: int) -> bool:
    """Return whether an address is in a window."""
    return 0 <= address - window.address < window.nbytes
