"""Which parts of one or more address ranges are free: the book-keeping of pools and arenas, no memory involved."""

from bisect import bisect_left, insort

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
