"""Keep memory from the OS and hand it out again: slabs that requests are cut from, small and large ones apart."""

from lightning_cxl.errors import TierFullError
from lightning_cxl.memory.adaptors import whole_pages
from lightning_cxl.memory.numa import PAGE_BYTES
from lightning_cxl.memory.reclaim import ReclaimingResource
from lightning_cxl.memory.resource import Buffer, MemoryResource
from lightning_cxl.memory.slabs import Slabs

_SLACK_FRACTION = 0.125
_UNLUCKY_FRACTION = 0.5


class PoolResource(ReclaimingResource):
    """Pools the buffers ("slabs") of `upstream`.

    Small requests are cut from shared slabs. One of at least a quarter of `slab_bytes` is cut from the tightest free
    block that earlier large ones have left behind, and gets a slab of exactly its size where none is large enough. So
    once the largest sizes have been there, smaller ones of any size need nothing new: where memory is pinned, a slab
    costs far more than what is cut from it.

    Free slabs are kept. At a new peak of use they give way to a new slab where the pool would otherwise hold more than
    12.5 % and one shared slab above that peak. Below it a new slab means that the free ones were cut unluckily, and
    they give way at 50 % only: less would give back and take the same slabs in every step. `trim` gives all of them
    back, and so does a request that `upstream` could not serve otherwise. Thread-safe.

    Args:
        upstream: where slabs come from.
        slab_bytes: size of a shared slab.
    """

    def __init__(self, upstream: MemoryResource, slab_bytes: int = 16 * 2**20) -> None:
        super().__init__()
        self._upstream = upstream
        self._slab_bytes = slab_bytes
        self._large_bytes = slab_bytes // 4
        self._small, self._large = Slabs(), Slabs()
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
            is_large = nbytes >= self._large_bytes
            slabs = self._large if is_large else self._small
            buffer = slabs.take(nbytes, alignment, self)
            if buffer is None:
                slabs.add(self._new_slab(nbytes, alignment) if is_large else self._new_shared_slab(nbytes, alignment))
                buffer = slabs.take(nbytes, alignment, self)
                assert buffer is not None
            self._used_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            return buffer

    def usage(self) -> tuple[int, int]:
        """Return the bytes in living buffers and the bytes held from `upstream`."""
        with self._lock:
            self._drain()
            return self._used_bytes, self._held_bytes

    def _new_shared_slab(self, nbytes: int, alignment: int) -> Buffer:
        for size in (self._slab_bytes, self._large_bytes):
            try:
                return self._new_slab(size, max(alignment, PAGE_BYTES))
            except TierFullError:
                continue
        return self._new_slab(nbytes, max(alignment, PAGE_BYTES))  # the end of a budget may still hold the request

    def _new_slab(self, nbytes: int, alignment: int) -> Buffer:
        nbytes = whole_pages(nbytes)
        wanted = self._used_bytes + nbytes
        slack = _SLACK_FRACTION if wanted > self._peak_bytes else _UNLUCKY_FRACTION
        allowed = int(max(self._peak_bytes, wanted) * (1 + slack)) + self._slab_bytes
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
        (self._large if nbytes >= self._large_bytes else self._small).take_back(address)

    def _release_one(self) -> bool:
        """Give a free slab back, the largest first, shared ones last; return whether there was one."""
        nbytes = self._large.drop_largest() or self._small.drop_largest()
        self._held_bytes -= nbytes
        return nbytes > 0

    def _release_free(self) -> None:
        while self._release_one():
            pass
