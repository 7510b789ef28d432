"""Adaptors over a resource that keep count: the byte budget of a tier."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_cxl.errors import TierFullError
from lightning_cxl.memory.numa import PAGE_BYTES, PageSource, allocate_pages
from lightning_cxl.memory.resource import Buffer, Span
from lightning_cxl.native._numa import Mapping
from lightning_cxl.units import format_bytes


class BudgetFullError(TierFullError):
    """A tier's budget is what a request does not fit in."""


class Budget:
    """How many bytes of one tier may be held from the OS, and are; shared by every stack of the tier.

    Thread-safe. `credit` takes no lock: it is called by dying buffers, see [Note: Life of a Buffer].

    Args:
        tier: name used in messages.
        limit_bytes: never exceeded.
    """

    def __init__(self, tier: str, limit_bytes: int) -> None:
        self.tier = tier
        self.limit_bytes = limit_bytes
        self._held_bytes = 0
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes held from the OS now."""
        with self._lock:
            return self._settle()

    def charge(self, nbytes: int) -> None:
        """Count `nbytes` as held.

        Raises:
            BudgetFullError: the budget does not allow it; nothing is counted then.
        """
        with self._lock:
            held = self._settle()
            if held + nbytes <= self.limit_bytes:
                self._held_bytes = held + nbytes
                return
        raise BudgetFullError(
            f"cannot place {format_bytes(nbytes)} on tier `{self.tier}`: {format_bytes(self.limit_bytes - held)} of "
            f"{format_bytes(self.limit_bytes)} free. Raise the budget of `{self.tier}`, or allow another tier."
        )

    def credit(self, nbytes: int) -> None:
        """Count `nbytes` as given back."""
        self._returned.append(nbytes)

    def _settle(self) -> int:
        while self._returned:
            self._held_bytes -= self._returned.popleft()
        return self._held_bytes


class BudgetResource:
    """Charges a budget for all that `upstream` backs, in whole pages.

    Args:
        upstream: backs memory of one tier.
        budget: of that tier.
        node_fraction: of the free memory of `upstream`, what this may use: tiers on the same nodes divide it.
    """

    def __init__(self, upstream: PageSource, budget: Budget, node_fraction: float = 1.0) -> None:
        self.tier_name = upstream.tier_name
        self.inherit = upstream.inherit
        self._upstream = upstream
        self._budget = budget
        self._node_fraction = node_fraction

    def free_bytes(self) -> int:
        """Return what both the budget and `upstream` have free."""
        rest = self._budget.limit_bytes - self._budget.held_bytes
        return min(rest, int(self._upstream.free_bytes() * self._node_fraction))

    def allocate(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> Buffer:
        """Return memory of `upstream` if the budget allows it.

        Raises:
            TierFullError: budget or upstream exhausted.
        """
        return allocate_pages(self, nbytes, alignment)

    def deallocate(self, buffer: Buffer) -> None:
        """Return the bytes of a dying buffer to the budget; its mapping dies with it."""
        self.release(buffer.spans)

    def commit(self, mapping: Mapping, offset: int, nbytes: int) -> tuple[Span, ...]:
        """Charge and back a range."""
        with self._charged(nbytes):
            return self._upstream.commit(mapping, offset, nbytes)

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        """Charge and back parts of a range that were compared with what is free."""
        with self._charged(sum(nbytes for _, nbytes in parts)):
            return self._upstream.back(mapping, parts)

    def release(self, spans: Sequence[Span]) -> None:
        """Return what was committed to the budget."""
        self._budget.credit(sum(whole_pages(span.nbytes) for span in spans))

    @contextmanager
    def _charged(self, nbytes: int) -> Iterator[None]:
        self._budget.charge(nbytes)
        try:
            yield
        except BaseException:
            self._budget.credit(nbytes)
            raise


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole 4 KiB pages, what the OS really gives."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
