"""`predict_gather`: how long the weights of a unit take to come together on every device of a machine, in two ways.

With N ranks on the machine, each with one device and a part of B / N bytes of a unit in host memory::

    link    = min(host_link, host_memory / N)        bytes per second of one device while all of them copy

    shared  = B / link                               each device reads the whole unit over its own link

    peers   = max(own, others)                       each device reads its own part, and the devices send each other
              own    = B / N / link                  theirs (NVLink). The next unit's own part comes meanwhile
              others = B * (N - 1) / N / peer
    peers   = own + others                           where what peers send comes over the same link (PCIe)

So sharing wins where devices have no links of their own: `peers` moves as many bytes over the link into a device, and
sends them besides. Peers win with fast links of their own, as the host's memory is read once, not N times.
"""

import math
from dataclasses import dataclass

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.reader import Rate


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherLinks:
    """What a gather on one machine goes over."""

    ranks: int
    """Of the machine that shard one copy of the weights."""
    host_link_bytes_per_s: Rate
    """From host memory to one device, alone."""
    host_memory_bytes_per_s: Rate
    """Most that all devices together read from the tier of the weights."""
    peer_bytes_per_s: Rate
    """What one device gets from the others while all of them gather."""
    peers_use_host_link: bool
    """Whether that comes over the link to the host's memory: PCIe, with or without the host in between."""

    def __post_init__(self) -> None:
        """Refuse what no machine has."""
        if self.ranks < 1:
            raise ConfigError(f"ranks must be at least 1, got {self.ranks}")
        for name in ("host_link_bytes_per_s", "host_memory_bytes_per_s", "peer_bytes_per_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a positive number, got {value!r}")


@dataclass(frozen=True, slots=True)
class GatherSeconds:
    """What a gather of the same bytes takes in both ways, predicted or measured."""

    nbytes: int
    """Of the whole unit."""
    shared: float
    """Every rank reads shared host memory."""
    peers: float
    """Ranks send each other their parts."""
    source: str
    """`"predicted"` or `"measured"`."""

    @property
    def shares_weights(self) -> bool:
        """Whether shared memory is the faster way; also where both take as long, for it needs no collective."""
        return self.shared <= self.peers

    def explain(self) -> str:
        """Return one line for a report."""
        ways = {"shared host memory": self.shared, "gathers between ranks": self.peers}
        (fast, less), (slow, more) = sorted(ways.items(), key=lambda item: (item[1], item[0] != "shared host memory"))
        speeds = f"{self.nbytes / less / 1e9:.2f} GB/s, {slow} {self.nbytes / more / 1e9:.2f} GB/s"
        return f"weights come together by {fast}: {speeds} ({self.source})"


def predict_gather(nbytes: int, links: GatherLinks) -> GatherSeconds:
    """Return how long a unit of `nbytes` takes in the steady state, unit after unit.

    Args:
        nbytes: of the whole unit, in the dtype in which it is stored.
        links: of the machine.
    """
    link = min(links.host_link_bytes_per_s, links.host_memory_bytes_per_s / links.ranks)
    own = nbytes / links.ranks / link
    others = nbytes * (links.ranks - 1) / links.ranks / links.peer_bytes_per_s
    peers = own + others if links.peers_use_host_link else max(own, others)
    return GatherSeconds(nbytes, nbytes / link, peers, "predicted")
