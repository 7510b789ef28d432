"""What a link is: how fast bytes flow over it, and which links a copy between device and host memory uses."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_cxl.errors import TierNotFoundError

Direction = Literal["h2d", "d2h"]


@dataclass(frozen=True, slots=True)
class Link:
    """Something that copies share: a memory tier, or the device's own link."""

    read_bytes_per_s: float
    """Bandwidth of copies to the device (h2d), which read from host memory."""
    write_bytes_per_s: float
    """Bandwidth of copies from the device (d2h), which write to host memory."""
    latency_s: float = 0.0
    """Time that passes before the first byte of a copy, during which the copy takes up no bandwidth."""
    duplex: float = 1.0
    """How much reading and writing fit side by side: 1, they share one bandwidth; 2, neither slows down the other."""

    def __post_init__(self) -> None:
        for name in ("read_bytes_per_s", "write_bytes_per_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number of bytes per second, got {value}")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s must be a number of seconds of at least 0, got {self.latency_s}")
        if not 1 <= self.duplex <= 2:
            raise ValueError(
                f"duplex must be between 1 (reading and writing share the bandwidth) and 2 (each has its own), "
                f"got {self.duplex}"
            )

    def bytes_per_s(self, direction: Direction) -> float:
        """Return the bandwidth of copies of one direction that have the link to themselves."""
        return self.read_bytes_per_s if direction == "h2d" else self.write_bytes_per_s

    def scaled(self, speed: float, latency: float) -> "Link":
        """Return a link whose bandwidths and latency are multiples of these."""
        return Link(
            self.read_bytes_per_s * speed, self.write_bytes_per_s * speed, self.latency_s * latency, self.duplex
        )


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """Bytes of one tier that work on the host goes through."""

    read_bytes: float = 0.0
    write_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.read_bytes < math.inf and 0 <= self.write_bytes < math.inf):
            raise ValueError(f"traffic must be numbers of bytes of at least 0, got {self}")

    def __add__(self, other: "HostTraffic") -> "HostTraffic":
        return HostTraffic(self.read_bytes + other.read_bytes, self.write_bytes + other.write_bytes)

    def __mul__(self, factor: float) -> "HostTraffic":
        return HostTraffic(self.read_bytes * factor, self.write_bytes * factor)

    @property
    def nbytes(self) -> float:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes

    def by_direction(self) -> dict[Direction, float]:
        """Return the bytes by the direction of the copies that they are like: reading is what h2d does."""
        return {"h2d": self.read_bytes, "d2h": self.write_bytes}


@dataclass(frozen=True, slots=True)
class Route:
    """What one copy, or one piece of work on the host, uses on its way."""

    uses: Mapping[str, float]
    """How long one byte occupies each resource, in seconds; at least one is above 0."""
    latency_s: float

    def seconds(self, nbytes: float) -> float:
        """Return how long a copy takes that has all resources to itself."""
        return self.latency_s + nbytes * max(self.uses.values())


@dataclass(frozen=True, slots=True)
class Links:
    """The links of one device and its host."""

    device: Link
    """Between device and host; with a duplex of 2 each direction has its own bandwidth, as over PCIe."""
    tiers: Mapping[str, Link]
    """Host memory by the name of its tier."""

    def route(self, direction: Direction, shares: Mapping[str, float]) -> Route:
        """Return what a copy uses whose host side lies on tiers by `shares`.

        A striped range is walked from its start to its end, so all its tiers are read or written at once, each at its
        share of the rate, and the slowest one decides: the copy ends when its slowest part does.

        Args:
            direction: whether the tiers are read (h2d) or written (d2h).
            shares: tier name to fraction of the bytes, adding up to 1; empty for a copy of no bytes.

        Raises:
            TierNotFoundError: a tier without a link.
            ValueError: shares are negative or do not add up to 1.
        """
        if shares and (min(shares.values()) < 0 or not math.isclose(sum(shares.values()), 1, abs_tol=1e-6)):
            raise ValueError(f"shares of tiers must add up to 1 and not be negative, got {dict(shares)}")
        uses = _uses("device", self.device, direction, 1.0)
        latency_s = 0.0
        for name, share in shares.items():
            link = self._tier(name)
            if share:
                uses |= _uses(f"tier {name}", link, direction, share)
                latency_s = max(latency_s, link.latency_s)
        return Route(uses, self.device.latency_s + latency_s)

    def host_route(self, traffic: Mapping[str, HostTraffic]) -> Route:
        """Return what work of the host's CPUs uses: its tiers, all at once, and not the device's link.

        Reading and writing take what they take in copies: with a card's caps for copies of 53.3 and 38.2 GB/s and a
        duplex of 1.5, Adam's mix of 16 bytes read and 12 written flows at 68.4 GB/s, where 66.7 to 68.8 were measured.

        Args:
            traffic: by tier name; a byte of the route stands for its part of all of it.

        Raises:
            TierNotFoundError: a tier without a link.
        """
        total = sum(each.nbytes for each in traffic.values())
        uses: dict[str, float] = {}
        for name, each in traffic.items():
            link = self._tier(name)
            for direction, nbytes in each.by_direction().items():
                if nbytes:
                    used = _uses(f"tier {name}", link, direction, nbytes / total)
                    uses |= {resource: uses.get(resource, 0.0) + seconds for resource, seconds in used.items()}
        return Route(uses or {"host": 1.0}, 0.0)  # no traffic takes no time, but a route uses something

    def scaled(self, speed: float, latency: float) -> "Links":
        """Return links of other speeds and latencies, all by the same factors."""
        return Links(
            self.device.scaled(speed, latency), {name: link.scaled(speed, latency) for name, link in self.tiers.items()}
        )

    def _tier(self, name: str) -> Link:
        if name not in self.tiers:
            raise TierNotFoundError(
                f"there is no link for tier `{name}`: the simulated host has {', '.join(self.tiers) or 'none'}. "
                "Add it to `tiers`."
            )
        return self.tiers[name]


def _uses(name: str, link: Link, direction: Direction, share: float) -> dict[str, float]:
    """Return how long one byte of a copy occupies the link's direction, and what both directions have in common."""
    seconds = share / link.bytes_per_s(direction)
    return {f"{name}, {direction}": seconds, f"{name}, both": seconds / link.duplex}
