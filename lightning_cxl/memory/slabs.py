"""`Slabs`: buffers that requests are cut from, and which of their bytes are free."""

from bisect import bisect_right, insort

from lightning_cxl.memory.blocks import BlockList
from lightning_cxl.memory.resource import Buffer, MemoryResource, cut_spans


class Slabs:
    """Cuts requests from the tightest free block of any slab; neighbours that come back are one block again.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._blocks = BlockList()  # offsets are addresses
        self._slabs: dict[int, Buffer] = {}  # by address
        self._starts: list[int] = []  # sorted

    def add(self, slab: Buffer) -> None:
        """Add a slab from which buffers are cut."""
        self._slabs[slab.address] = slab
        insort(self._starts, slab.address)
        self._blocks.add_range(slab.address, slab.nbytes)

    def take(self, nbytes: int, alignment: int, resource: MemoryResource) -> Buffer | None:
        """Return a buffer of `nbytes` that goes back to `resource`; None where no free block is large enough."""
        address = self._blocks.allocate(nbytes, alignment)
        if address is None:
            return None
        slab = self._slabs[self._starts[bisect_right(self._starts, address) - 1]]
        return Buffer(address, nbytes, cut_spans(slab.spans, address - slab.address, nbytes), resource)

    def take_back(self, address: int) -> None:
        """Make the bytes of a buffer free again."""
        self._blocks.free(address)

    def drop_largest(self) -> int:
        """Let go of the largest slab of which nothing is in use and return its size; 0 where there is none."""
        free = self._blocks.free_ranges()
        if not free:
            return 0
        address = max(free, key=lambda address: self._slabs[address].nbytes)
        self._starts.remove(address)
        del self._slabs[address]
        return self._blocks.drop_range(address)
