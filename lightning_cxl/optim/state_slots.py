"""`StateSlots`: host memory that records of optimizer state visit, one piece with a hard cap."""

from collections.abc import Callable

from lightning_cxl.memory.blocks import BlockList
from lightning_cxl.memory.resource import Buffer

_ALIGNMENT = 4096  # bytes: what direct I/O asks for at most


class StateSlots:
    """Cuts slots of exact sizes from one piece of memory. Not thread-safe.

    Args:
        allocate: gives page-aligned memory; called when the first slot is taken, and again where a record is larger
            than all the slots so far.
        cap_bytes: of all slots together. A record that is larger has the memory for itself, as much as it needs.
    """

    def __init__(self, allocate: Callable[[int], Buffer], cap_bytes: int) -> None:
        self._allocate = allocate
        self.cap_bytes = cap_bytes
        self._memory: Buffer | None = None
        self._blocks = BlockList()
        self._num_taken = 0

    def take(self, nbytes: int) -> Buffer | None:
        """Return a slot of `nbytes`; None while others leave no room for it.

        Raises:
            TierFullError: there is no memory for slots.
        """
        if self._memory is None or nbytes > self._memory.nbytes:
            if self._num_taken:
                return None
            self.close()
            self.cap_bytes = max(self.cap_bytes, nbytes)
            self._memory = self._allocate(self.cap_bytes)
            self._blocks.add_range(self._memory.address, self._memory.nbytes)
        address = self._blocks.allocate(nbytes, _ALIGNMENT)
        if address is None:
            return None
        self._num_taken += 1
        return self._memory.slice(address - self._memory.address, nbytes)

    def give_back(self, slot: Buffer) -> None:
        """Take a slot back; nobody reads or writes it any more."""
        self._blocks.free(slot.address)
        self._num_taken -= 1

    def close(self) -> None:
        """Let go of the memory; all slots have been given back. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._blocks.drop_range(memory.address)
