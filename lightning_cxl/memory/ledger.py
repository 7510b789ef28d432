"""Who holds what: the living buffers of a `HostMemory`, counted by tensor role and tier."""

import threading
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.tiers.placement import TensorRole


@dataclass(slots=True)
class _Count:
    live_bytes: int = 0
    peak_bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class Ledger:
    """Counts bytes from `record` until the returned buffer dies, and finds the buffer at an address.

    Thread-safe. Deaths are noted without a lock and booked at the next call, see [Note: Life of a Buffer].
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead: deque[int] = deque()
        self._starts: list[int] = []  # addresses of living buffers, sorted
        self._entries: dict[int, tuple[int, str, TensorRole]] = {}  # address -> nbytes, tier, role
        self._tiers: dict[str, _Count] = {}
        self._roles: dict[tuple[TensorRole, str], _Count] = {}

    def record(self, inner: Buffer, tier: str, role: TensorRole) -> Buffer:
        """Count `inner` and return the buffer to hand out in its place."""
        address, nbytes = inner.address, inner.nbytes
        with self._lock:
            self._settle()
            self._entries[address] = (nbytes, tier, role)
            insort(self._starts, address)
            self._tiers.setdefault(tier, _Count()).add(nbytes)
            self._roles.setdefault((role, tier), _Count()).add(nbytes)
        return Buffer(address, nbytes, inner.spans, self, inner)

    def deallocate(self, buffer: Buffer) -> None:
        """Note a dying buffer."""
        self._dead.append(buffer.address)

    def allocate(self, nbytes: int, *, alignment: int = 64) -> Buffer:
        """Refuse: a ledger owns no memory, it only counts what others hand out."""
        raise NotImplementedError("a Ledger counts buffers, allocate from a MemoryResource and record the buffer here")

    def tier_at(self, address: int) -> str | None:
        """Return the tier of the living buffer that has `address`, None when there is none."""
        with self._lock:
            self._settle()
            index = bisect_right(self._starts, address) - 1
            if index < 0:
                return None
            nbytes, tier, _ = self._entries[self._starts[index]]
            return tier if address < self._starts[index] + nbytes else None

    def tier_bytes(self, tier: str) -> tuple[int, int]:
        """Return the bytes living on a tier now, and their peak."""
        with self._lock:
            self._settle()
            count = self._tiers.get(tier, _Count())
            return count.live_bytes, count.peak_bytes

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

    def _settle(self) -> None:
        while self._dead:
            address = self._dead.popleft()
            nbytes, tier, role = self._entries.pop(address)
            del self._starts[bisect_right(self._starts, address) - 1]
            self._tiers[tier].add(-nbytes)
            self._roles[role, tier].add(-nbytes)
