"""What plans and predictions know of a machine: its tiers with their speeds, its device, its cache.

Every speed is what streaming work reaches in the steady state, not a data sheet's peak. Where a machine comes from:
`lightning_cxl.machine.machine_file` (YAML) or `lightning_cxl.machine.speeds` (the machine this runs on).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_cxl.errors import ConfigError, TierNotFoundError
from lightning_cxl.machine.links import MachineLinks
from lightning_cxl.machine.reader import Positive, Rate, Size
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.ssd_options import SSD

Split = dict[str, float]
"""Tier name to the fraction of the bytes that lie there; fractions add up to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineTier:
    """One tier of host memory and how fast it is."""

    name: str
    kind: TierKind
    capacity_bytes: Size
    """What a job may use of it."""
    num_nodes: int = 1
    """NUMA nodes; interleaving by pages gives each node an equal share."""
    adam_bytes_per_s: Rate
    """Bytes read and written per second when the CPUs stream Adam's mix (16 bytes read, 12 written) through it."""
    device_read_bytes_per_s: Rate
    """Most that devices together read from it, by copies from host to device."""
    device_write_bytes_per_s: Rate
    """Most that devices together write to it, by copies from device to host."""
    device_write_buffer_bytes: Size = 0
    """What the CPUs' cache takes in of one copy from a device, so that this tier need not be waited for."""
    latency_ns: float | None = None
    """Of a load that depends on the one before; shown only, all modelled work streams."""
    backed_by: str | None = None
    """The tier whose memory this one really is, when there is no such hardware; they share its bandwidth."""

    def __post_init__(self) -> None:
        """Refuse speeds that no machine has."""
        for name in ("adam_bytes_per_s", "device_read_bytes_per_s", "device_write_bytes_per_s"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ConfigError(f"tier `{self.name}`: {name} must be a positive number, got {value!r}")
        for name in ("capacity_bytes", "device_write_buffer_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"tier `{self.name}`: {name} must not be negative, got {getattr(self, name)}")
        if self.num_nodes < 1:
            raise ConfigError(f"tier `{self.name}`: num_nodes must be at least 1, got {self.num_nodes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSsd:
    """The tier `ssd`: files on one or several drives, and how fast these are together."""

    capacity_bytes: Size
    """What a job may use of it, all versions together."""
    read_bytes_per_s: Rate | None = None
    """Of all drives together; None where it is not known."""
    write_bytes_per_s: Rate | None = None
    num_drives: int = 1
    """Over which every record is cut."""
    versions: int = 1
    """How often optimizer state lies on the drives: 2 where checkpoints refer to it. Weights lie there once."""

    def __post_init__(self) -> None:
        """Refuse numbers that no drive has."""
        if self.num_drives < 1 or self.versions not in (1, 2):
            raise ConfigError(
                f"ssd: num_drives must be at least 1 and versions 1 or 2, got {self.num_drives} and {self.versions}"
            )

    @property
    def has_speeds(self) -> bool:
        """Whether seconds can be predicted."""
        return self.read_bytes_per_s is not None and self.write_bytes_per_s is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What computes, and its link to host memory."""

    name: str = "gpu"
    memory_bytes: Size = 0
    """0: not known, nothing is checked against it."""
    flops: Positive
    """Floating-point operations per second that training a transformer reaches, not the data sheet's peak."""
    h2d_bytes_per_s: Rate
    """Copies to it, one device alone, from memory that is not slower than the link."""
    d2h_bytes_per_s: Rate
    copy_latency_s: float = 0.0
    """Time before the first byte of a copy."""
    count: int = 1
    """How many such devices the machine has; they share the host's memory."""
    is_host: bool = False
    """The CPU computes: nothing is copied, and what the model computes with lies in host memory."""

    def __post_init__(self) -> None:
        """Refuse speeds that no device has."""
        for name in ("flops", "h2d_bytes_per_s", "d2h_bytes_per_s"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ConfigError(f"device `{self.name}`: {name} must be a positive number, got {value!r}")
        if self.count < 1 or self.memory_bytes < 0 or not 0 <= self.copy_latency_s < math.inf:
            raise ConfigError(
                f"device `{self.name}`: count must be at least 1, memory_bytes and copy_latency_s not negative, got "
                f"{self.count}, {self.memory_bytes} and {self.copy_latency_s}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """The CPUs' last-level cache, for work that comes back to the bytes it touched last."""

    nbytes: Size = 0
    bytes_per_s: Rate = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Tiers nearest first, a device, a cache."""

    name: str
    tiers: tuple[MachineTier, ...]
    device: Device
    cache: Cache = Cache()
    host_bytes: Size | None = None
    """Most that all tiers together hold, where they share memory or a limit; None: the sum of their capacities."""
    write_contention: float = math.inf
    """How sharply copies to the host slow down where the link and a tier are about equally fast: with t1 and t2 the
    seconds that each would take alone, a copy takes (t1^p + t2^p)^(1/p). Infinite: the longer of the two."""
    source: str = ""
    """Where the numbers come from, one line."""
    has_speeds: bool = True
    """False: all speeds of `tiers` and `device` are placeholders; bytes can be planned, seconds cannot be predicted."""
    ssd: MachineSsd | None = None
    """The tier `ssd`, which is none of `tiers`: it is no memory. None where there is none."""
    links: MachineLinks = field(default_factory=MachineLinks)
    """What several devices share, and the network."""

    def __post_init__(self) -> None:
        """Refuse tiers that cannot be told apart."""
        if not self.tiers:
            raise ConfigError(f"machine `{self.name}` has no memory tier")
        if any(tier.kind is TierKind.SSD or tier.name == SSD for tier in self.tiers):
            raise ConfigError(
                f"machine `{self.name}` has the tier {SSD!r} among `tiers`, which are memory: describe it under `ssd`, "
                f"with capacity_bytes, read_bytes_per_s and write_bytes_per_s"
            )
        if len(set(self.names)) < len(self.tiers):
            raise ConfigError(f"machine `{self.name}` has two tiers of one name: {', '.join(self.names)}")
        for tier in self.tiers:
            if tier.backed_by is not None:
                self.tier(tier.backed_by)
        if not self.write_contention >= 1:
            raise ConfigError(
                f"machine `{self.name}`: write_contention must be at least 1, got {self.write_contention}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Tier names, nearest first."""
        return tuple(tier.name for tier in self.tiers)

    @property
    def memory_bytes(self) -> int:
        """Most that all tiers together hold."""
        capacity = sum(tier.capacity_bytes for tier in self.tiers)
        return capacity if self.host_bytes is None else min(capacity, self.host_bytes)

    def tier(self, name: str) -> MachineTier:
        """Return the tier of that name.

        Raises:
            TierNotFoundError: there is none; the message names those that exist.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise TierNotFoundError(
            f"there is no tier {name!r}; machine `{self.name}` has: {', '.join(map(repr, self.names))}"
        )

    def select(self, kind: TierKind) -> tuple[MachineTier, ...]:
        """Return the tiers of a kind, nearest first."""
        return tuple(tier for tier in self.tiers if tier.kind is kind)

    def with_capacity(self, capacity_bytes: Mapping[str, int], host_bytes: int | None = None) -> "Machine":
        """Return this machine with other capacities of some tiers, by name, and of all together unless that is None."""
        for name in capacity_bytes:
            self.tier(name)
        tiers = tuple(replace(t, capacity_bytes=capacity_bytes.get(t.name, t.capacity_bytes)) for t in self.tiers)
        return replace(self, tiers=tiers, host_bytes=self.host_bytes if host_bytes is None else host_bytes)

    def with_devices(self, count: int) -> "Machine":
        """Return this machine as a run on `count` of its devices has it.

        Devices that share a port share its speed. Where the CPU is the device, its ranks share the CPU.

        Raises:
            ConfigError: it has not so many devices.
        """
        device, links = self.device, self.links
        if device.is_host:
            own = device.flops * device.count / max(1, count)
            return replace(self, device=replace(device, count=count, flops=own))
        if not 1 <= count <= device.count:
            more = (
                f". To plan a machine with {count}, write `count: {count}` under `device` in a machine file (--tiers), "
                "as examples/machines/eight_gpus.yaml does, with the `links` of its devices"
            )
            raise ConfigError(
                f"machine `{self.name}` has {device.count} x {device.name}, got {count} devices: choose 1 to "
                f"{device.count} of each machine, and more machines for more (--num-nodes){more if count > 0 else ''}"
            )
        port = math.inf if links.port_bytes_per_s is None else links.port_bytes_per_s
        share = port / min(count, links.devices_per_port)
        h2d, d2h = min(device.h2d_bytes_per_s, share), min(device.d2h_bytes_per_s, share)
        return replace(self, device=replace(device, count=count, h2d_bytes_per_s=h2d, d2h_bytes_per_s=d2h))


def check_split(split: Split, machine: Machine) -> None:
    """Refuse fractions that are negative, do not add up to 1, or name tiers that the machine does not have.

    Raises:
        TierNotFoundError: an unknown tier.
        ValueError: the fractions are no split of one whole.
    """
    for name in split:
        machine.tier(name)
    if not split or min(split.values()) < 0 or not math.isclose(sum(split.values()), 1, abs_tol=1e-6):
        raise ValueError(f"a split's fractions must add up to 1 and not be negative, got {split}")
