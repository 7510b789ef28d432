"""`HostSlots`: host memory that records visit, one piece with a hard cap."""

from collections.abc import Callable, Sequence

from lightning_cxl.memory.blocks import BlockList
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.storage.drive import BLOCK_BYTES


class HostSlots:
    """Cuts slots of exact sizes from one piece of memory. Not thread-safe.

    Args:
        allocate: gives page-aligned memory; called when the first slot is taken, and again where what is asked for
            together is larger than all the slots so far.
        cap_bytes: of all slots together. What is asked for together and is larger gets as much as it needs, while there
            are no other slots.
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
        slots = self.take_all([nbytes])
        return None if slots is None else slots[0]

    def take_all(self, sizes: Sequence[int]) -> list[Buffer] | None:
        """Return slots of these sizes, whole blocks; None, and no slot, while others leave no room for all of them.

        Raises:
            TierFullError: there is no memory for slots.
        """
        needed = sum(sizes)
        if self._memory is None or needed > self._memory.nbytes:
            if self._num_taken:
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
        self._num_taken += len(addresses)
        start = self._memory.address
        return [self._memory.slice(at - start, nbytes) for at, nbytes in zip(addresses, sizes, strict=True)]

    def give_back(self, slot: Buffer) -> None:
        """Take a slot back; nobody reads or writes it any more."""
        self._blocks.free(slot.address)
        self._num_taken -= 1

    def close(self) -> None:
        """Let go of the memory; all slots have been given back. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._blocks.drop_range(memory.address)
