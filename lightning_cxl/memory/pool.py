"""Keep memory from the OS and hand it out again: slabs that requests are cut from, small and large ones apart."""

import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import deque

from lightning_cxl.errors import TierFullError
from lightning_cxl.memory.numa import HUGE_PAGE_BYTES, PAGE_BYTES, PageSource, reserve, whole_pages
from lightning_cxl.memory.resource import Buffer, MemoryResource, Span, cut_spans
from lightning_cxl.units import format_bytes

# ----------------------------------------------------------------------------------------------------
# How resources that keep memory take the bytes of dead buffers back, whichever thread they die on.


class ReclaimingResource(ABC):
    """Notes dying buffers without a lock and takes them back under the lock of the next call.

    See [Note: Life of a Buffer]. A subclass holds `_lock` and calls `_drain` first in everything it offers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead: deque[tuple[int, int]] = deque()  # (address, nbytes)
        self._closed = False

    def deallocate(self, buffer: Buffer) -> None:
        """Note a dying buffer; its bytes are free from the next call of another method on."""
        self._dead.append((buffer.address, buffer.nbytes))
        if self._closed:  # nobody may ever call again
            self._reclaim_late()

    def trim(self) -> None:
        """Give everything that is free back to where it came from."""
        with self._lock:
            self._drain()
            self._release_free()

    def close(self) -> None:
        """Give back what is free now, and the rest as its last buffers die. Living buffers stay valid."""
        self._closed = True
        self.trim()
        self._reclaim_late()

    def _reclaim_late(self) -> None:
        # Whoever holds the lock looks at the list again after letting go, so a failed attempt loses nothing; waiting
        # here could wait for this very thread.
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._drain()
                self._release_free()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while self._dead:
            self._take_back(*self._dead.popleft())

    @abstractmethod
    def _take_back(self, address: int, nbytes: int) -> None:
        """Make the bytes of a dead buffer free again; the lock is held."""

    @abstractmethod
    def _release_free(self) -> None:
        """Give everything that is free back to where it came from; the lock is held."""


# ----------------------------------------------------------------------------------------------------
# Which parts of one or more address ranges are free: the book-keeping of pools and arenas, no memory involved.

_GRANULE_BYTES = 64  # a cache line; without it gaps of a few bytes would pile up between blocks


class BlockList:
    """Offsets handed out from ranges in multiples of 64 bytes, coalesced when they come back.

    Neighbouring ranges are never merged: a block always lies in one range. Not thread-safe.
    """

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (nbytes, offset) of free blocks, sorted
        self._size_at: dict[int, int] = {}  # free block: offset -> nbytes
        self._start_of: dict[int, int] = {}  # free block: end -> offset
        self._used: dict[int, int] = {}  # handed out: offset -> nbytes
        self._ranges: dict[int, int] = {}  # offset -> nbytes

    def add_range(self, offset: int, nbytes: int) -> None:
        """Add ``[offset, offset + nbytes)``, all free."""
        self._ranges[offset] = nbytes
        self._insert(offset, nbytes)

    def extend_range(self, offset: int, nbytes: int) -> None:
        """Add `nbytes`, all free, at the end of the range that begins at `offset`."""
        end = offset + self._ranges[offset]
        self._ranges[offset] += nbytes
        self._used[end] = nbytes
        self.free(end)

    def free_ranges(self) -> list[int]:
        """Return the offsets of ranges of which nothing is in use."""
        return [offset for offset, nbytes in self._ranges.items() if self._size_at.get(offset) == nbytes]

    def drop_range(self, offset: int) -> int:
        """Forget a wholly free range and return its size."""
        nbytes = self._ranges[offset]
        if self._size_at.get(offset) != nbytes:
            raise ValueError(f"the range at {offset} is in use")
        self._remove(offset, nbytes)
        return self._ranges.pop(offset)

    def allocate(self, nbytes: int, alignment: int, *, lowest: bool = False) -> int | None:
        """Take `nbytes` (at least 1) from the tightest free block, or from the lowest one.

        Returns:
            An offset that is a multiple of `alignment`, or None when no free block is large enough.
        """
        nbytes = -(-nbytes // _GRANULE_BYTES) * _GRANULE_BYTES
        found = self._lowest(nbytes, alignment) if lowest else self._tightest(nbytes, alignment)
        if found is None:
            return None
        block, size = found
        offset = -(-block // alignment) * alignment
        self._remove(block, size)
        if offset > block:
            self._insert(block, offset - block)
        if block + size > offset + nbytes:
            self._insert(offset + nbytes, block + size - offset - nbytes)
        self._used[offset] = nbytes
        return offset

    def free(self, offset: int) -> None:
        """Take back what `allocate` returned."""
        nbytes = self._used.pop(offset)
        before = self._start_of.get(offset)
        if before is not None and offset not in self._ranges:
            size = self._size_at[before]
            self._remove(before, size)
            offset, nbytes = before, nbytes + size
        end = offset + nbytes
        after = self._size_at.get(end)
        if after is not None and end not in self._ranges:
            self._remove(end, after)
            nbytes += after
        self._insert(offset, nbytes)

    def end_of_use(self, offset: int) -> int:
        """Return the end of the last block in use of the range at `offset` (`offset` itself when all is free)."""
        end = offset + self._ranges[offset]
        return self._start_of.get(end, end)

    def _tightest(self, nbytes: int, alignment: int) -> tuple[int, int] | None:
        for index in range(bisect_left(self._by_size, (nbytes, -1)), len(self._by_size)):
            size, block = self._by_size[index]
            if size - (-block % alignment) >= nbytes:
                return block, size
        return None

    def _lowest(self, nbytes: int, alignment: int) -> tuple[int, int] | None:
        fitting = (item for item in self._size_at.items() if item[1] - (-item[0] % alignment) >= nbytes)
        return min(fitting, default=None)

    def _insert(self, offset: int, nbytes: int) -> None:
        insort(self._by_size, (nbytes, offset))
        self._size_at[offset] = nbytes
        self._start_of[offset + nbytes] = offset

    def _remove(self, offset: int, nbytes: int) -> None:
        del self._by_size[bisect_left(self._by_size, (nbytes, offset))]
        del self._size_at[offset]
        del self._start_of[offset + nbytes]


# ----------------------------------------------------------------------------------------------------
# `Slabs`: buffers that requests are cut from, and which of their bytes are free.


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
    """

    def __init__(self, upstream: MemoryResource, slab_bytes: int = 16 * 2**20) -> None:
        super().__init__()
        self._upstream = upstream
        self._slab_bytes = slab_bytes
        self._large_bytes = slab_bytes // 4
        self._small, self._large = Slabs(), Slabs()
        self._used_bytes = self._held_bytes = self._peak_bytes = 0

    def allocate(self, nbytes: int, *, alignment: int = 64) -> Buffer:
        """Return exactly `nbytes`, aligned."""
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


# ----------------------------------------------------------------------------------------------------
# Per-step memory for activations: one reserved address range whose pages come and go at its end.

STEP_BYTES = 32 * 2**20
_STEPS_KEPT = 4
_SHRINK_BELOW_FRACTION = 0.75


class ArenaResource(ReclaimingResource):
    """Hands out the lowest free addresses of one reserved range and backs them as the high-water mark grows.

    Growth never moves a tensor. `end_step` gives the pages above the highest mark of the last four steps back when
    that mark is below three quarters of what is backed. Thread-safe.

    Args:
        step_bytes: the range grows to a multiple of this, a multiple of 2 MiB. While it is small, it grows by about a
            quarter instead, so that a small run does not take 32 MiB for its first input.
    """

    def __init__(
        self,
        source: PageSource,
        reserve_bytes: int,
        *,
        step_bytes: int = STEP_BYTES,
        least_bytes: int = HUGE_PAGE_BYTES,
    ) -> None:
        super().__init__()
        self._source = source
        self._step_bytes = step_bytes
        self._least_bytes = least_bytes
        self._mapping = reserve(reserve_bytes, HUGE_PAGE_BYTES, source)
        self._blocks = BlockList()
        self._blocks.add_range(0, self._mapping.nbytes)
        self._used_bytes = 0
        self._backed = 0  # bytes, from the start of the range
        self._spans: list[Span] = []  # of the backed part
        self._step_mark = 0
        self._marks: deque[int] = deque(maxlen=_STEPS_KEPT)

    def allocate(self, nbytes: int, *, alignment: int = 64) -> Buffer:
        """Return exactly `nbytes`, aligned."""
        if nbytes == 0:
            return Buffer(0, 0, (), None)
        with self._lock:
            self._drain()
            offset = self._blocks.allocate(nbytes, alignment, lowest=True)
            if offset is None:
                raise TierFullError(
                    f"cannot place {format_bytes(nbytes)} in the arena of tier `{self._source.tier_name}`: its range "
                    f"of {format_bytes(self._mapping.nbytes)} has no gap that large. Raise the tier's budget."
                )
            end = offset + nbytes
            try:
                if end > self._backed:
                    self._grow(end)
                spans = cut_spans(self._spans, offset, nbytes)
            except BaseException:
                self._blocks.free(offset)
                raise
            self._used_bytes += nbytes
            self._step_mark = max(self._step_mark, end)
            return Buffer(self._mapping.address + offset, nbytes, spans, self, self._mapping)

    def end_step(self) -> None:
        """Say that a training step is over: the range shrinks when the last steps needed much less than is backed."""
        with self._lock:
            self._drain()
            top = self._blocks.end_of_use(0)
            self._marks.append(self._step_mark)
            self._step_mark = top
            keep = max(*self._marks, top)
            if len(self._marks) == _STEPS_KEPT and keep < self._backed * _SHRINK_BELOW_FRACTION:
                self._shrink(-(-keep // self._step_bytes) * self._step_bytes)

    def usage(self) -> tuple[int, int]:
        """Return the bytes in living buffers and the bytes that are backed."""
        with self._lock:
            self._drain()
            return self._used_bytes, self._backed

    def _grow(self, end: int) -> None:
        """Back the range up to `end` and some more; near the end of a budget by less and less more."""
        quarter = -(-end // 4 // self._least_bytes) * self._least_bytes
        units = (min(self._step_bytes, quarter), HUGE_PAGE_BYTES)
        sizes = [min(-(-end // unit) * unit, self._mapping.nbytes) for unit in units]
        for size in sizes:
            try:
                return self._back_up_to(size)
            except TierFullError:
                continue
        self._back_up_to(whole_pages(end))

    def _back_up_to(self, end: int) -> None:
        spans = self._source.commit(self._mapping, self._backed, end - self._backed)
        for span in spans:
            last = self._spans[-1] if self._spans else None
            if last is not None and (last.tier, last.node_id) == (span.tier, span.node_id):
                self._spans[-1] = Span(last.tier, last.node_id, last.offset, last.nbytes + span.nbytes)
            else:
                self._spans.append(span)
        self._backed = end

    def _shrink(self, end: int) -> None:
        if end >= self._backed:
            return
        self._mapping.discard(end, self._backed - end)
        gone = cut_spans(self._spans, end, self._backed - end)
        self._spans = list(cut_spans(self._spans, 0, end))
        self._source.release(gone)
        self._backed = end

    def _take_back(self, address: int, nbytes: int) -> None:
        self._used_bytes -= nbytes
        self._blocks.free(address - self._mapping.address)

    def _release_free(self) -> None:
        # whole huge pages: the kernel gives back a part of one only when it has split it
        self._shrink(-(-self._blocks.end_of_use(0) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
