"""The speeds and capacities that plans need of a machine: `Machine`, and its YAML files.

Every speed is that of streaming work in the steady state, not a data sheet's peak. `lightning_cxl.machine.speeds` makes
the `Machine` of the hardware at hand.

A file has the fields of `Machine`: ``tiers`` is a list with the fields of `MachineTier`, ``device`` has those of
`Device`, ``cache`` those of `Cache`, ``ssd`` those of `MachineSsd`, ``links`` those of `MachineLinks`. Sizes may be
written as ``128GiB``, bytes per second as ``51.8 GiB/s``. The annotations of a dataclass say what a file may give for
its fields: text, true or false, whole numbers, numbers, a word of an enum, another dataclass, a list of dataclasses,
and null where the annotation has ``| None``.
"""

import enum
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from lightning_cxl.config import SSD
from lightning_cxl.errors import ConfigError, TierFullError, TierNotFoundError
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.text import format_bytes, parse_bytes

Size = Annotated[int, "bytes"]
"""Bytes; a file may say ``128GiB``."""
Rate = Annotated[float, "bytes per second"]
"""Bytes per second; a file may say ``51.8 GiB/s``."""
Positive = Annotated[float, "positive"]
"""A number above zero."""
_T = TypeVar("_T")
_NO_LONGER_READ = ("sockets", "socket_bytes_per_s")  # keys of `links` in earlier files


def read(kind: type[_T], content: object, where: str) -> _T:
    """Return a `kind` from a mapping of its fields."""
    values = read_fields(kind, content, where)
    missing = [
        f.name
        for f in fields(kind)  # type: ignore[arg-type]  # a dataclass
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values
    ]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; its keys are: {_names(kind)}")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def read_fields(kind: type, content: object, where: str) -> dict[str, Any]:
    """Return those fields of a `kind` that a mapping gives, as their types; see `read`."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} must map {_names(kind)} to values, got {content!r}")
    types = get_type_hints(kind, include_extras=True)
    unknown = [key for key in content if key not in types and key not in _NO_LONGER_READ]
    if unknown:
        raise ConfigError(f"{where} has the unknown key {', '.join(map(repr, unknown))}; its keys are: {_names(kind)}")
    values = {}
    for f in fields(kind):
        if f.name in content:
            values[f.name] = value = _value(types[f.name], content[f.name], f"{where}: {f.name}")
            if value == math.inf and f.default != math.inf:
                raise ConfigError(f"{where}: {f.name} must be finite, got {value}")
    return values


def _names(kind: type) -> str:
    return ", ".join(f.name for f in fields(kind))


def _value(hint: Any, value: object, where: str) -> Any:
    """Return a value as the type that a field's annotation names."""
    if hint in _READERS:
        return _READERS[hint](value, where)
    arguments = get_args(hint)
    if type(None) in arguments:
        return None if value is None else _value(arguments[0], value, where)
    if get_origin(hint) is tuple:
        return _entries(arguments[0], value, where)
    if isinstance(hint, type) and is_dataclass(hint):
        return read(hint, value, where)
    assert issubclass(hint, enum.Enum), f"no file gives a {hint}"
    try:
        return hint(value)
    except ValueError:
        words = ", ".join(str(each.value) for each in hint)
        raise ConfigError(f"{where} must be one of {words}, got {value!r}") from None


def _entries(kind: type, value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, each entry with {_names(kind)}")
    entry = where.rpartition(" ")[2].removesuffix("s")  # "tiers" has a "tier 1 of 2"
    return tuple(read(kind, each, f"{entry} {number} of {len(value)}") for number, each in enumerate(value, 1))


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be text, got {value!r}")
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, got {value!r}")
    return value


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where} must be a whole number, got {value!r}")
    if value < 0:
        raise ConfigError(f"{where} must not be negative, got {value}")
    return value


def _size(value: object, where: str) -> int:
    try:
        return parse_bytes(value)  # type: ignore[arg-type]  # it refuses other types itself
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _rate(value: object, where: str) -> float:
    if isinstance(value, str) and value.rstrip().endswith("B/s"):
        return float(_size(value.rstrip().removesuffix("/s"), where))
    return _positive(value, where, ' of bytes per second, or text such as "51.8 GiB/s"')


def _positive(value: object, where: str, unit: str = "") -> float:
    number = _number(value, where, unit)
    if number == 0:
        raise ConfigError(f"{where} must be positive, got {value!r}")
    return number


def _number(value: object, where: str, unit: str = "") -> float:
    # YAML 1.1 takes 278e9, without point and sign, for text
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not number >= 0:
        raise ConfigError(f"{where} must be a number{unit}, at least 0, got {value!r}")
    return number


_READERS: dict[Any, Callable[[object, str], Any]] = {
    str: _text,
    bool: _flag,
    int: _count,
    float: _number,
    Size: _size,
    Rate: _rate,
    Positive: _positive,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLinks:
    """Links that several devices share. Speeds are those of one direction while the other one is as busy."""

    devices_per_port: int = 1
    """Devices behind one root port or switch, whose way to host memory they share."""
    port_bytes_per_s: Rate | None = None
    """Of that way; None: devices do not slow down each other there."""
    peer_bytes_per_s: Rate | None = None
    """Sent by each device, and received, while all devices of the machine exchange data over NVLink or PCIe. None:
    there is no such way, or its speed is not known; what devices exchange then goes through host memory."""
    peer_latency_s: float = 0.0
    """Of one step of a ring of devices."""
    network_bytes_per_s: Rate | None = None
    """Sent by the machine to others, and received, over all of its adapters. None: not known."""
    network_latency_s: float = 0.0
    """Of one step of a ring of machines."""

    def __post_init__(self) -> None:
        """Refuse links that no machine has."""
        if self.devices_per_port < 1:
            raise ConfigError(f"links: devices_per_port must be at least 1, got {self.devices_per_port}")
        for name in ("port_bytes_per_s", "peer_bytes_per_s", "network_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"links: {name} must be a positive number, or left out, got {value!r}")
        for name in ("peer_latency_s", "network_latency_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"links: {name} must not be negative, got {getattr(self, name)}")
        if self.devices_per_port > 1 and self.port_bytes_per_s is None:
            raise ConfigError(
                f"links: {self.devices_per_port} devices share a port, and port_bytes_per_s does not say how fast it is"
            )


Split = dict[str, float]
"""Tier name to the fraction of the bytes that lie there; fractions add up to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineTier:
    """One tier of host memory and how fast it is."""

    name: str
    kind: TierKind
    capacity_bytes: Size
    """Bytes that a job may use."""
    num_nodes: int = 1
    """NUMA nodes; interleaving by pages gives each node an equal share."""
    adam_bytes_per_s: Rate
    """Bytes read and written per second when the CPUs stream Adam's mix (16 bytes read, 12 written) through it."""
    device_read_bytes_per_s: Rate
    """Most that devices together read from it, by copies from host to device."""
    device_write_bytes_per_s: Rate
    """Most that devices together write to it, by copies from device to host."""
    device_write_buffer_bytes: Size = 0
    """Bytes of one copy from a device that the CPUs' cache takes in, so that the copy need not wait for this tier."""
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
    """Bytes that a job may use, all versions together."""
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

    def check_bytes(self, needed: int) -> None:
        """Refuse bytes, of all versions together, that the tier cannot hold.

        Raises:
            TierFullError: says how much is needed, and how much there is.
        """
        if needed > self.capacity_bytes:
            twice = ', with optimizer state twice because of checkpoint="reference"' if self.versions > 1 else ""
            raise TierFullError(
                f"tier `ssd` has {format_bytes(self.capacity_bytes)}, and what goes there needs "
                f"{format_bytes(needed)}{twice}. Raise its budget in `tiers`, free space on its drives, place less "
                f'there, or keep smaller state: state="bf16" or "8bit"'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The device that computes, and its link to host memory."""

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
    """Source of the numbers, one line."""
    has_speeds: bool = True
    """False: all speeds of `tiers` and `device` are placeholders; bytes can be planned, seconds cannot be predicted."""
    ssd: MachineSsd | None = None
    """The tier `ssd`, which is none of `tiers`: it is no memory. None where there is none."""
    links: MachineLinks = field(default_factory=MachineLinks)
    """Links that several devices share, and the network."""

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
    """Refuse fractions that are negative, do not add up to 1, or name tiers that the machine does not have."""
    for name in split:
        machine.tier(name)
    if not split or min(split.values()) < 0 or not math.isclose(sum(split.values()), 1, abs_tol=1e-6):
        raise ValueError(f"a split's fractions must add up to 1 and not be negative, got {split}")


_OF_THE_HARDWARE = ("name", "kind", "num_nodes", "backed_by")
_OF_THE_DRIVES = ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Overrides:
    """Fields that a user gives of this machine: by tier of memory, of its other parts, and of the machine itself."""

    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    ssd: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


def load_machine(path: str | os.PathLike[str]) -> Machine:
    """Read a machine from a YAML file.

    Raises:
        ConfigError: the file cannot be read, lacks a key, has one that nobody knows, or a value that no machine has.
    """
    content = _load(path, "the machine file")
    try:
        return read(Machine, content, "the file")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def save_machine(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Write a machine to a YAML file that `load_machine` reads back exactly."""
    content = asdict(machine)
    content["tiers"] = [{**tier, "kind": tier["kind"].value} for tier in content["tiers"]]
    Path(path).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))


def load_overrides(path: str | os.PathLike[str]) -> Overrides:
    """Read some fields of a machine, which win over everything else that is known of it.

    For example::

        tiers:
          - {name: cxl, adam_bytes_per_s: 60 GB/s, capacity_bytes: 200GiB}
        device: {flops: 4.0e+14}

    A whole machine file will do, too. The kind of a tier, the number of drives of the tier `ssd`, and whether the
    device is the host, are left out: the machine knows that itself.
    """
    content = _load(path, "speeds from")
    try:
        return _overrides({} if content is None else content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _load(path: str | os.PathLike[str], what: str) -> object:
    """Return what a YAML file has; `what` it is of names the file in messages."""
    try:
        return yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error


def _overrides(content: object) -> Overrides:
    parts = {"tiers", "device", "cache", "ssd"}
    top = {key: content[key] for key in content if key not in parts} if isinstance(content, Mapping) else content
    machine = read_fields(Machine, top, "the file")
    assert isinstance(content, Mapping)  # else refused
    tiers: dict[str, dict[str, Any]] = {}
    rows = content.get("tiers", [])
    if not isinstance(rows, list):
        raise ConfigError(f"tiers must be a list, each entry with a name and what is known of it, got {rows!r}")
    for number, row in enumerate(rows, 1):
        where = f"tier {number} of {len(rows)}"
        values = read_fields(MachineTier, row, where)
        if "name" not in values:
            raise ConfigError(f"{where} needs a name")
        tiers[values["name"]] = {name: values[name] for name in values if name not in _OF_THE_HARDWARE}
    device = read_fields(Device, content.get("device", {}), "device")
    device.pop("is_host", None)
    cache = read_fields(Cache, content.get("cache", {}), "cache")
    ssd = read_fields(MachineSsd, content.get("ssd") or {}, "ssd")
    return Overrides(tiers, device, cache, {name: ssd[name] for name in ssd if name in _OF_THE_DRIVES}, machine)
