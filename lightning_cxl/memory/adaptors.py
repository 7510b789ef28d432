"""Adaptors over a resource that keep count: the byte budget of a tier."""

import threading
from collections import deque

from lightning_cxl.errors import TierFullError
from lightning_cxl.memory.resource import Buffer, MemoryResource
from lightning_cxl.units import format_bytes


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
            TierFullError: the budget does not allow it; nothing is counted then.
        """
        with self._lock:
            held = self._settle()
            if held + nbytes <= self.limit_bytes:
                self._held_bytes = held + nbytes
                return
        raise TierFullError(
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
    """Charges a budget for every buffer of `upstream`, in whole pages."""

    def __init__(self, upstream: MemoryResource, budget: Budget) -> None:
        self._upstream = upstream
        self._budget = budget

    def allocate(self, nbytes: int, *, alignment: int = 4096) -> Buffer:
        """Return `upstream`'s buffer if the budget allows it.

        Raises:
            TierFullError: budget or upstream exhausted.
        """
        charged = whole_pages(nbytes)
        self._budget.charge(charged)
        try:
            inner = self._upstream.allocate(nbytes, alignment=alignment)
        except BaseException:
            self._budget.credit(charged)
            raise
        return Buffer(inner.address, nbytes, inner.spans, self, inner)

    def deallocate(self, buffer: Buffer) -> None:
        """Return the buffer's bytes to the budget; `upstream` gets its own buffer back by itself."""
        self._budget.credit(whole_pages(buffer.nbytes))


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole 4 KiB pages, what the OS really gives."""
    return -(-nbytes // 4096) * 4096
