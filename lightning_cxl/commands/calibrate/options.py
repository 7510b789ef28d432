"""How much is measured: `Options`, thorough or quick."""

from dataclasses import dataclass
from typing import NamedTuple


class Figure(NamedTuple):
    """A median, and how far the fastest and the slowest round are apart in medians."""

    value: float
    spread: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Sizes and rounds. Buffers for memory have at least four times the caches, whatever is said here."""

    rounds: int = 9
    node_bytes: int = 1 << 30
    """Of one node, for bandwidths; a long sweep hides how threads start."""
    chase_bytes: int = 512 << 20
    """Of one node, for latency; 64 MiB leave the caches, more leave the second level of TLBs, too."""
    chase_steps: int = 300_000
    copy_bytes: int = 256 << 20
    """Of one copy; a link is at its full speed from 32 MiB on."""
    matmul_sizes: tuple[int, ...] = (1024, 2048, 4096, 8192)
    matmul_seconds: float = 1.0
    """Sizes that would take longer are left out; small ones say more about starting than about computing."""
    ssd_bytes: int = 4 << 30


QUICK = Options(
    rounds=3,
    node_bytes=64 << 20,
    chase_bytes=64 << 20,
    chase_steps=100_000,
    copy_bytes=32 << 20,
    matmul_seconds=0.1,
    ssd_bytes=256 << 20,
)
