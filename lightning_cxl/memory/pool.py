"""Keep memory from the OS and hand it out again: slabs for small requests, exact-size slabs for large ones."""

from bisect import bisect_left, bisect_right, insort

from lightning_cxl.errors import TierFullError
from lightning_cxl.memory.adaptors import whole_pages
from lightning_cxl.memory.blocks import BlockList
from lightning_cxl.memory.reclaim import ReclaimingResource
from lightning_cxl.memory.resource import Buffer, MemoryResource, cut_spans

_WASTE_FRACTION = 0.125


class PoolResource(ReclaimingResource):
    """Pools the buffers ("slabs") of `upstream`.

    A request of at least a quarter of `slab_bytes` gets a slab of exactly its size, or a free one that is at most
    12.5 % larger; smaller ones are cut from shared slabs. Free slabs are kept for reuse, but a new one replaces them
    where the pool would otherwise hold more than 12.5 % and one shared slab above its peak use. `trim` gives all of
    them back, and so does a request that `upstream` could not serve otherwise. Thread-safe.

    Args:
        upstream: where slabs come from.
        slab_bytes: size of a shared slab.
    """

    def __init__(self, upstream: MemoryResource, slab_bytes: int = 16 * 2**20) -> None:
        super().__init__()
        self._upstream = upstream
        self._slab_bytes = slab_bytes
        self._large_bytes = slab_bytes // 4
        self._blocks = BlockList()  # of the shared slabs, offsets are addresses
        self._shared: dict[int, Buffer] = {}
        self._shared_starts: list[int] = []
        self._large: dict[int, Buffer] = {}  # in use, by address
        self._spare: list[tuple[int, int]] = []  # (nbytes, address) of free large slabs, sorted
        self._spare_slabs: dict[int, Buffer] = {}
        self._used_bytes = self._held_bytes = self._peak_bytes = 0

    def allocate(self, nbytes: int, *, alignment: int = 64) -> Buffer:
        """Return exactly `nbytes`, aligned.

        Raises:
            TierFullError: `upstream` is exhausted, even after every free slab was given back.
        """
        if nbytes == 0:
            return Buffer(0, 0, (), None)
        with self._lock:
            self._drain()
            if nbytes >= self._large_bytes:
                buffer = self._allocate_large(nbytes, alignment)
            else:
                buffer = self._allocate_small(nbytes, alignment)
            self._used_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            return buffer

    def usage(self) -> tuple[int, int]:
        """Return the bytes in living buffers and the bytes held from `upstream`."""
        with self._lock:
            self._drain()
            return self._used_bytes, self._held_bytes

    def _allocate_large(self, nbytes: int, alignment: int) -> Buffer:
        slab = self._take_spare(nbytes, alignment)
        if slab is None:
            slab = self._new_slab(nbytes, alignment)
        self._large[slab.address] = slab
        return Buffer(slab.address, nbytes, cut_spans(slab.spans, 0, nbytes), self)

    def _take_spare(self, nbytes: int, alignment: int) -> Buffer | None:
        limit = int(nbytes * (1 + _WASTE_FRACTION))
        for index in range(bisect_left(self._spare, (nbytes, 0)), len(self._spare)):
            size, address = self._spare[index]
            if size > limit:
                return None
            if address % alignment == 0:
                del self._spare[index]
                return self._spare_slabs.pop(address)
        return None

    def _allocate_small(self, nbytes: int, alignment: int) -> Buffer:
        address = self._blocks.allocate(nbytes, alignment)
        if address is None:
            slab = self._new_shared_slab(nbytes, alignment)
            self._shared[slab.address] = slab
            insort(self._shared_starts, slab.address)
            self._blocks.add_range(slab.address, slab.nbytes)
            address = self._blocks.allocate(nbytes, alignment)
            assert address is not None
        slab = self._shared[self._shared_starts[bisect_right(self._shared_starts, address) - 1]]
        return Buffer(address, nbytes, cut_spans(slab.spans, address - slab.address, nbytes), self)

    def _new_shared_slab(self, nbytes: int, alignment: int) -> Buffer:
        for size in (self._slab_bytes, self._large_bytes):
            try:
                return self._new_slab(size, max(alignment, 4096))
            except TierFullError:
                continue
        return self._new_slab(nbytes, max(alignment, 4096))  # the end of a budget may still hold the request itself

    def _new_slab(self, nbytes: int, alignment: int) -> Buffer:
        nbytes = whole_pages(nbytes)
        allowed = int(max(self._peak_bytes, self._used_bytes + nbytes) * (1 + _WASTE_FRACTION)) + self._slab_bytes
        while self._held_bytes + nbytes > allowed and self._release_one():
            pass
        try:
            slab = self._upstream.allocate(nbytes, alignment=alignment)
        except TierFullError:
            held = self._held_bytes
            self._release_free()
            if self._held_bytes == held:
                raise
            slab = self._upstream.allocate(nbytes, alignment=alignment)
        self._held_bytes += slab.nbytes
        return slab

    def _take_back(self, address: int, nbytes: int) -> None:
        self._used_bytes -= nbytes
        slab = self._large.pop(address, None)
        if slab is None:
            self._blocks.free(address)
        else:
            insort(self._spare, (slab.nbytes, address))
            self._spare_slabs[address] = slab

    def _release_one(self) -> bool:
        """Give a free slab back, the largest first, shared ones last; return whether there was one."""
        if self._spare:
            nbytes, address = self._spare.pop()
            self._held_bytes -= nbytes
            del self._spare_slabs[address]
            return True
        for start in self._blocks.free_ranges():
            self._held_bytes -= self._blocks.drop_range(start)
            self._shared_starts.remove(start)
            del self._shared[start]
            return True
        return False

    def _release_free(self) -> None:
        while self._release_one():
            pass
