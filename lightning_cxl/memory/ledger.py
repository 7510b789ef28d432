"""Who holds what: the living buffers of a `HostMemory`, counted by tensor role and tier."""

import threading
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_cxl.memory.resource import Buffer, Span, cut_spans
from lightning_cxl.placement.placement import TensorRole

SplitKey = tuple[tuple[str, float], ...]
"""Tiers and their shares of a buffer; equal splits are equal tuples."""


@dataclass(slots=True)
class _Count:
    live_bytes: int = 0
    peak_bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


@dataclass(frozen=True, slots=True)
class _Entry:
    nbytes: int
    spans: tuple[Span, ...]
    tiers: tuple[tuple[str, int], ...]  # bytes by tier
    role: TensorRole
    split: SplitKey | None


class Counted:
    """Bytes that a `Ledger` counts while this lives; nobody owns them here.

    Args:
        gone: gets `what` when this dies.
        what: role, tier and bytes.
    """

    __slots__ = ("_gone", "_what")

    def __init__(self, gone: deque[tuple[TensorRole, str, int]], what: tuple[TensorRole, str, int]) -> None:
        self._gone = gone
        self._what = what

    def __del__(self) -> None:
        """Note the death; without a lock, as of a buffer."""
        self._gone.append(self._what)


class Ledger:
    """Counts bytes by their spans from `record` until the returned buffer dies, and finds the buffer at an address.

    Thread-safe. Deaths are noted without a lock and booked at the next call, see [Note: Life of a Buffer].
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead: deque[int] = deque()
        self._gone: deque[tuple[TensorRole, str, int]] = deque()
        self._starts: list[int] = []  # addresses of living buffers, sorted
        self._entries: dict[int, _Entry] = {}  # by address
        self._tiers: dict[str, _Count] = {}
        self._roles: dict[tuple[TensorRole, str], _Count] = {}

    def record(self, inner: Buffer, role: TensorRole, split: SplitKey | None) -> Buffer:
        """Count `inner` and return the buffer to hand out in its place.

        Args:
            inner: its spans say what each tier holds.
            role: what it is for.
            split: how it was meant to be divided over tiers; None when it was not possible.
        """
        counts = Counter[str]()
        for span in inner.spans:
            counts[span.tier] += span.nbytes
        entry = _Entry(inner.nbytes, inner.spans, tuple(counts.items()), role, split)
        with self._lock:
            self._settle()
            self._entries[inner.address] = entry
            insort(self._starts, inner.address)
            self._count(entry, 1)
        return Buffer(inner.address, inner.nbytes, inner.spans, self, inner)

    def count(self, nbytes: int, role: TensorRole, tier: str) -> "Counted":
        """Count bytes of a role that lie on a tier in memory of others, until what is returned dies."""
        with self._lock:
            self._settle()
            self._roles.setdefault((role, tier), _Count()).add(nbytes)
        return Counted(self._gone, (role, tier, nbytes))

    def deallocate(self, buffer: Buffer) -> None:
        """Note a dying buffer."""
        self._dead.append(buffer.address)

    def allocate(self, nbytes: int, *, alignment: int = 64) -> Buffer:
        """Refuse: a ledger owns no memory, it only counts what others hand out."""
        raise NotImplementedError("a Ledger counts buffers, allocate from a MemoryResource and record the buffer here")

    def tier_at(self, address: int) -> str | None:
        """Return the tier of the byte at `address`, None when no living buffer has it."""
        return next(self.tiers_of(address, 1))[0]

    def tiers_of(self, address: int, nbytes: int) -> Iterator[tuple[str | None, int]]:
        """Yield (tier, bytes) of neighbouring parts that are ``[address, address + nbytes)`` together.

        What lies beyond the living buffer that has `address` has the tier None.
        """
        start, entry = self._find(address)
        size = 0 if entry is None else min(nbytes, start + entry.nbytes - address)
        tier, length = None, 0
        for span in cut_spans(entry.spans, address - start, size) if entry is not None else ():
            if span.tier != tier and length:
                yield tier, length
                length = 0
            tier, length = span.tier, length + span.nbytes
        if length:
            yield tier, length
        if size < nbytes:
            yield None, nbytes - size

    def split_at(self, address: int) -> SplitKey | None:
        """Return how the living buffer that has `address` was meant to be divided; None when there is none."""
        entry = self._find(address)[1]
        return None if entry is None else entry.split

    def tier_bytes(self, tier: str) -> tuple[int, int]:
        """Return the bytes living on a tier now, and their peak."""
        with self._lock:
            self._settle()
            count = self._tiers.get(tier, _Count())
            return count.live_bytes, count.peak_bytes

    def begin(self) -> None:
        """Let the peaks of roles begin anew, with what lives now."""
        with self._lock:
            self._settle()
            for count in self._roles.values():
                count.peak_bytes = count.live_bytes

    def role_bytes(self) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
        """Return the bytes per role and tier, now and at their peaks; roles and tiers never used are left out."""
        with self._lock:
            self._settle()
            live: dict[str, dict[str, int]] = {}
            peak: dict[str, dict[str, int]] = {}
            for (role, tier), count in self._roles.items():
                live.setdefault(role.value, {})[tier] = count.live_bytes
                peak.setdefault(role.value, {})[tier] = count.peak_bytes
            return live, peak

    def _find(self, address: int) -> tuple[int, _Entry | None]:
        """Return the start of the living buffer that has `address`, and its entry."""
        with self._lock:
            self._settle()
            index = bisect_right(self._starts, address) - 1
            start = self._starts[index] if index >= 0 else address
            entry = self._entries.get(start)
            return start, entry if entry is not None and address < start + entry.nbytes else None

    def _count(self, entry: _Entry, sign: int) -> None:
        for tier, nbytes in entry.tiers:
            self._tiers.setdefault(tier, _Count()).add(sign * nbytes)
            self._roles.setdefault((entry.role, tier), _Count()).add(sign * nbytes)

    def _settle(self) -> None:
        while self._dead:
            address = self._dead.popleft()
            del self._starts[bisect_right(self._starts, address) - 1]
            self._count(self._entries.pop(address), -1)
        while self._gone:
            role, tier, nbytes = self._gone.popleft()
            self._roles[role, tier].add(-nbytes)
