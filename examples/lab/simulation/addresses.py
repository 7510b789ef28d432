"""`AddressMap`: on which tiers host memory lies, and what it is for, by its address."""

import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lightning_cxl.memory.resource import Buffer, Span, cut_spans


class _Entry(NamedTuple):
    end: int
    name: str
    spans: tuple[Span, ...]
    shares: Mapping[str, float] | None


def tier_of_span(span: Span) -> str:
    """Return the name of the tier, which several nodes may share."""
    return span.tier


class AddressMap:
    """Tells a simulated engine the tiers and names of memory that was noted here; `shares` fits its ``tiers_of``.

    Nobody takes notes back: memory that is given out again is noted again, and what lay there before is forgotten.
    Thread-safe.

    Args:
        link_of: name of the link that a span uses; for links per node instead of per tier.
    """

    def __init__(self, link_of: Callable[[Span], str] = tier_of_span) -> None:
        self._link_of = link_of
        self._lock = threading.Lock()
        self._starts: list[int] = []  # sorted; the ranges do not overlap
        self._entries: dict[int, _Entry] = {}  # by start

    def note(self, buffer: Buffer, name: str, shares: Mapping[str, float] | None = None) -> Buffer:
        """Remember a buffer, and return it.

        Args:
            buffer: its spans say which part lies where.
            name: for traces.
            shares: fractions by tier that hold for every part of it; instead of the spans, for finer stripes.
        """
        start, end = buffer.address, buffer.address + buffer.nbytes
        with self._lock:
            first = bisect_right(self._starts, start)
            if first and self._entries[self._starts[first - 1]].end > start:
                first -= 1
            last = first
            while last < len(self._starts) and self._starts[last] < end:
                last += 1
            for stale in self._starts[first:last]:
                del self._entries[stale]
            del self._starts[first:last]
            if buffer.nbytes:
                insort(self._starts, start)
                self._entries[start] = _Entry(end, name, buffer.spans, shares)
        return buffer

    def shares(self, address: int, nbytes: int) -> Mapping[str, float]:
        """Return the fraction of each link in ``[address, address + nbytes)``.

        Raises:
            KeyError: not all of the range is in one noted buffer.
        """
        start, entry = self._find(address, nbytes)
        if entry.shares is not None:
            return entry.shares
        shares: dict[str, float] = {}
        for span in cut_spans(entry.spans, address - start, nbytes):
            link = self._link_of(span)
            shares[link] = shares.get(link, 0.0) + span.nbytes / nbytes
        return shares

    def name(self, address: int, nbytes: int) -> str:
        """Return the name that a range was noted by.

        Raises:
            KeyError: not all of the range is in one noted buffer.
        """
        return self._find(address, nbytes)[1].name

    def _find(self, address: int, nbytes: int) -> tuple[int, _Entry]:
        with self._lock:
            index = bisect_right(self._starts, address) - 1
            entry = self._entries[self._starts[index]] if index >= 0 else None
            if entry is None or address + nbytes > entry.end:
                raise KeyError(
                    f"no noted buffer has {hex(address)} to {hex(address + nbytes)}: note it when it is allocated"
                )
            return self._starts[index], entry
