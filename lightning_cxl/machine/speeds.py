"""The machine at hand with the best speeds that are known, `machine_of`; `Calibration`, what was measured of it.

Each field comes from the first source that has it: a file of the user, the calibration of this very machine (written by
the command ``calibrate``), the firmware's ratings. A tier without a speed leaves the machine unknown.
"""

import enum
import hashlib
import json
import math
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
import yaml

from lightning_cxl.config import SSD, cache_folder
from lightning_cxl.devices import devices_apart
from lightning_cxl.errors import ConfigError, TierFullError, TierNotFoundError, warn
from lightning_cxl.machine.topology import Tier, TierKind, Topology, drive_of, existing_folder, read_text, usable_cpus
from lightning_cxl.native import _cpu
from lightning_cxl.text import format_bytes, parse_bytes

# What plans need to know of a machine: `Machine`, and its YAML files. Every speed is that of streaming
# work in the steady state, not a data sheet's peak.
#
# A file has the fields of `Machine` and of the dataclasses in it. Annotations say what it may give for a field: text,
# true or false, numbers, a word of an enum, another dataclass, a list of dataclasses, and null where it has ``| None``.

Size = Annotated[int, "bytes"]  # a file may say ``128GiB``
Rate = Annotated[float, "bytes per second"]  # a file may say ``51.8 GiB/s``
Positive = Annotated[float, "positive"]
Count = Annotated[int, "at least 1"]
_T = TypeVar("_T")
_NO_LONGER_READ = ("sockets", "socket_bytes_per_s")  # keys of `links` in earlier files


def read(kind: type[_T], content: object, where: str) -> _T:
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


def read_fields(kind: type, content: object, where: str, *, partly: bool = False) -> dict[str, Any]:
    """Return the values by field; `partly`: those of dataclasses inside as such dicts, too, which may lack fields."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} must map {_names(kind)} to values, got {content!r}")
    types = _types(kind)
    unknown = [key for key in content if key not in types and key not in _NO_LONGER_READ]
    if unknown:
        raise ConfigError(f"{where} has the unknown key {', '.join(map(repr, unknown))}; its keys are: {_names(kind)}")
    given = [name for name in types if name in content]
    values = {name: _value(types[name], content[name], f"{where}: {name}", partly) for name in given}
    _check_numbers(kind, values, where)
    return values


def _names(kind: type) -> str:
    return ", ".join(f.name for f in fields(kind))


def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _value(hint: Any, value: object, where: str, partly: bool) -> Any:
    arguments = get_args(hint)
    if type(None) in arguments:
        return None if value is None else _value(arguments[0], value, where, partly)
    inner: Callable[[Any, object, str], Any] = partial(read_fields, partly=True) if partly else read
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} must be a list, each entry with {_names(arguments[0])}")
        entry = where.rpartition(" ")[2].removesuffix("s")  # "tiers" has a "tier 1 of 2"
        return tuple(inner(arguments[0], each, f"{entry} {i} of {len(value)}") for i, each in enumerate(value, 1))
    if isinstance(hint, type) and is_dataclass(hint):
        return inner(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        words = [each.value for each in hint]
        if value not in words:
            raise ConfigError(f"{where} must be one of {', '.join(words)}, got {value!r}")
        return hint(value)
    if hint in (str, bool):
        if not isinstance(value, hint):
            raise ConfigError(f"{where} must be {'text' if hint is str else 'true or false'}, got {value!r}")
        return value
    return _number(hint, value, where)


def _number(hint: Any, value: Any, where: str) -> float:
    try:
        if hint is Size:
            return parse_bytes(value)  # it refuses other types itself
        if hint is Rate and isinstance(value, str) and value.rstrip().endswith("B/s"):
            return float(parse_bytes(value.rstrip().removesuffix("/s")))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    is_whole = hint in (int, Count)
    if is_whole and type(value) is int:
        return value
    try:
        # YAML 1.1 takes 278e9, without point and sign, for text
        number = math.nan if is_whole or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        unit = ' of bytes per second, or text such as "51.8 GiB/s"' if hint is Rate else ""
        raise ConfigError(f"{where} must be a {'whole ' * is_whole}number{unit}, got {value!r}")
    return number


def _check_numbers(kind: type, values: Mapping[str, Any], where: str = "") -> None:
    prefix = f"{where}: " if where else ""
    for f in fields(kind):
        hint, value = _types(kind)[f.name], values.get(f.name)
        hint = get_args(hint)[0] if type(None) in get_args(hint) else hint
        if value is None or hint not in (int, Count, float, Size, Rate, Positive):
            continue
        if hint is Count and value < 1:
            raise ConfigError(f"{prefix}{f.name} must be at least 1, got {value}")
        if not value >= 0 or (hint in (Rate, Positive) and value == 0):
            least = "positive" if hint in (Rate, Positive) else "at least 0"
            raise ConfigError(f"{prefix}{f.name} must be {least}, got {value!r}")
        if value == math.inf and f.default != math.inf:
            raise ConfigError(f"{prefix}{f.name} must be finite, got {value}")


class _Checked:
    """A dataclass whose numbers are in the ranges that its annotations name."""

    __slots__ = ()

    def __post_init__(self) -> None:
        _check_numbers(type(self), {name: getattr(self, name) for name in _types(type(self))})


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLinks(_Checked):
    """Links that several devices share. Speeds are those of one direction while the other one is as busy."""

    devices_per_port: Count = 1
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
        _Checked.__post_init__(self)
        if self.devices_per_port > 1 and self.port_bytes_per_s is None:
            raise ConfigError(f"{self.devices_per_port} devices share a port, and port_bytes_per_s is not given")


Split = dict[str, float]  # tier name to the fraction of the bytes that lie there; fractions add up to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineTier(_Checked):
    """One tier of host memory and how fast it is."""

    name: str
    kind: TierKind
    capacity_bytes: Size
    """Bytes that a job may use."""
    num_nodes: Count = 1
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


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSsd(_Checked):
    """The tier `ssd`: files on one or several drives, and how fast these are together."""

    capacity_bytes: Size
    """Bytes that a job may use, all versions together."""
    read_bytes_per_s: Rate | None = None
    """Of all drives together; None where it is not known."""
    write_bytes_per_s: Rate | None = None
    num_drives: Count = 1
    """Over which every record is cut."""
    versions: int = 1
    """How often optimizer state lies on the drives: 2 where checkpoints refer to it. Weights lie there once."""

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        if self.versions not in (1, 2):
            raise ConfigError(f"versions must be 1 or 2, got {self.versions}")

    @property
    def has_speeds(self) -> bool:
        return self.read_bytes_per_s is not None and self.write_bytes_per_s is not None

    def check_bytes(self, needed: int) -> None:
        """Refuse bytes, of all versions together, that the tier cannot hold."""
        if needed > self.capacity_bytes:
            twice = ', with optimizer state twice because of checkpoint="reference"' if self.versions > 1 else ""
            raise TierFullError(
                f"tier `ssd` has {format_bytes(self.capacity_bytes)}, and what goes there needs "
                f"{format_bytes(needed)}{twice}. Raise its budget in `tiers`, free space on its drives, place less "
                f'there, or keep smaller state: state="bf16" or "8bit"'
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Device(_Checked):
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
    count: Count = 1
    """How many such devices the machine has; they share the host's memory."""
    is_host: bool = False
    """The CPU computes: nothing is copied, and what the model computes with lies in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache(_Checked):
    """The CPUs' last-level cache, for work that comes back to the bytes it touched last."""

    nbytes: Size = 0
    bytes_per_s: Rate = math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine(_Checked):
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
        _Checked.__post_init__(self)
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
        if self.write_contention < 1:
            raise ConfigError(f"write_contention must be at least 1, got {self.write_contention}")

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
        """Return the tier of that name; raises TierNotFoundError, which names those that exist."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise TierNotFoundError(
            f"there is no tier {name!r}; machine `{self.name}` has: {', '.join(map(repr, self.names))}"
        )

    def select(self, kind: TierKind) -> tuple[MachineTier, ...]:
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
    content = load_yaml(path, "the machine file")
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
    """Read some fields of a machine, which win over everything else that is known of it; a machine file will do, too.

    What the machine knows itself is left out: the kind of a tier, the number of drives, whether the device is the host.
    """
    content = load_yaml(path, "speeds from")
    try:
        given = read_fields(Machine, {} if content is None else content, "the file", partly=True)
        rows = given.pop("tiers", ())
        for number, row in enumerate(rows, 1):
            if "name" not in row:
                raise ConfigError(f"tier {number} of {len(rows)} needs a name")
        if "links" in given:
            given["links"] = MachineLinks(**given["links"])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    device, cache, ssd = given.pop("device", {}), given.pop("cache", {}), given.pop("ssd", None) or {}
    device.pop("is_host", None)
    tiers = {row["name"]: {name: row[name] for name in row if name not in _OF_THE_HARDWARE} for row in rows}
    return Overrides(tiers, device, cache, {name: ssd[name] for name in ssd if name in _OF_THE_DRIVES}, given)


def load_yaml(path: str | os.PathLike[str], what: str) -> object:
    try:
        return yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {what} {path} as YAML: {error}") from error


def cpu_model(root: Path = Path("/")) -> str:
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def describe_machine(topology: Topology, devices: Sequence[str] = ()) -> dict[str, Any]:
    """Return what speeds depend on, as JSON: CPUs, nodes with the CPUs this process may use, memory, devices."""
    root = topology.root or Path("/")
    cpus = usable_cpus(root, topology.measured_on)
    # capacities have two digits: kernels keep some memory for themselves, each another amount
    nodes = sorted({node.node_id: node for tier in topology.tiers for node in tier.nodes}.items())
    return {
        "cpu": cpu_model(root),
        "nodes": [
            {"node_id": node_id, "cpus": list(cpus.get(node_id, ())), "gib": f"{node.capacity_bytes / 2**30:.2g}"}
            for node_id, node in nodes
        ],
        "devices": list(devices),
    }


QUIET_FRACTION = 0.03  # when other processes take more than this part of the CPU time, measured numbers are doubtful
_VERSION = 2  # of the files; change it when fields change their names or meaning


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpeeds(_Checked):
    """One NUMA node, used by all CPUs of the process and by all devices."""

    node_id: int
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate
    """With stores that do not read the lines first, as a device writes."""
    adam_bytes_per_s: Rate
    """Bytes read and written per second, 16 to 12."""
    latency_ns: Positive | None = None
    """Of a load, from the nearest CPU; only earlier calibrations have it."""
    h2d_bytes_per_s: Rate | None = None
    """All devices together; None without a device."""
    d2h_bytes_per_s: Rate | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeeds(_Checked):
    kind: str
    """``"cpu"``, ``"cuda"`` or another type of ``torch.device``."""
    name: str
    flops: Positive
    """Of forward and backward of a Llama block in bf16, the fastest width."""
    h2d_bytes_per_s: Rate | None = None
    d2h_bytes_per_s: Rate | None = None
    copy_latency_s: Positive | None = None
    """A copy of a few bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdSpeeds(_Checked):
    folder: str
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate
    direct: bool
    """Past the page cache; False where the file system cannot do that, then the numbers are partly memory's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration(_Checked):
    date: str
    """Day, as in ``2026-01-31``."""
    num_threads: int
    nodes: tuple[NodeSpeeds, ...]
    devices: tuple[DeviceSpeeds, ...]
    cache_bytes: Size
    """Last-level caches of the CPUs this process may use; 0 where the kernel does not tell."""
    cache_bytes_per_s: Rate | None = None
    """Adam's mix, over and over the same quarter of them."""
    ssds: tuple[SsdSpeeds, ...] = ()
    others_fraction: float = 0.0
    """Part of the machine's CPU time that other processes took meanwhile."""

    @property
    def origin(self) -> str:
        """The source of numbers that come from here. Too few threads, or other processes, show in all of them."""
        text = f"calibration of {self.date} with {self.num_threads} threads"
        return text + (f", beside others that took {self.others_fraction:.0%} of the CPU time" if self.doubtful else "")

    @property
    def doubtful(self) -> bool:
        return self.others_fraction > QUIET_FRACTION

    def node(self, node_id: int) -> NodeSpeeds | None:
        return next((node for node in self.nodes if node.node_id == node_id), None)


def calibration_path(topology: Topology, devices: Sequence[str]) -> Path:
    description = json.dumps(describe_machine(topology, devices), sort_keys=True)
    return cache_folder() / "calibration" / f"{hashlib.sha256(description.encode()).hexdigest()[:16]}.json"


def save_calibration(calibration: Calibration, topology: Topology, devices: Sequence[str]) -> Path:
    """Keep what was measured on this machine; readers see the old file or the new one, whole."""
    path = calibration_path(topology, devices)
    content = {"version": _VERSION, "machine": describe_machine(topology, devices), "speeds": asdict(calibration)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
        unfinished = Path(folder, path.name)
        unfinished.write_text(json.dumps(content, indent=1))
        return unfinished.replace(path)


def load_calibration(topology: Topology, devices: Sequence[str]) -> Calibration | None:
    """Return what was measured on this very machine; None when nothing was, or it cannot be used (with a warning)."""
    if topology.root is None:
        return None
    path = calibration_path(topology, devices)
    try:
        content = json.loads(path.read_text())
        if content["version"] != _VERSION:
            raise ValueError(f"its version is {content['version']}, this program writes {_VERSION}")
        return read(Calibration, content["speeds"], "what was measured")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        warn(
            f"the measured speeds in {path} are not used ({type(error).__name__}: {error}). Measure again: `python -m "
            "lightning_cxl calibrate`."
        )
        return None


def ssd_of(
    topology: Topology, calibration: Calibration | None = None, overrides: Overrides | None = None
) -> MachineSsd | None:
    """Return the tier `ssd` of a topology; None where it has none.

    Speeds are those of a user's file, else those that ``calibrate --ssd`` has measured last on the tier's drives. Parts
    of a record are read and written on all drives at once, so the slowest drive decides. No speed is known as long as
    one drive was not measured.
    """
    tier, overrides = topology.ssd, overrides or Overrides()
    if tier is None:
        return None
    folders = [(Path(each.folder), each) for each in (calibration.ssds if calibration is not None else ())]
    measured = {drive_of(folder): speeds for folder, speeds in folders if folder.is_dir()}
    drives = Counter(drive_of(existing_folder(folder)) for folder in tier.folders)
    values: dict[str, Any] = {}
    for name in ("read_bytes_per_s", "write_bytes_per_s") if measured.keys() >= drives.keys() else ():
        values[name] = drives.total() * min(getattr(measured[drive], name) / num for drive, num in drives.items())
    values |= overrides.ssd
    values["capacity_bytes"] = min(tier.capacity_bytes, overrides.ssd.get("capacity_bytes", tier.capacity_bytes))
    return MachineSsd(num_drives=len(tier.folders), versions=tier.versions, **values)


_READ, _WRITTEN = 16, 12  # bytes per element of Adam's mix

# Without a calibration. Training a 7B model on one H100: 272 TFLOP/s (arXiv 2604.05091, by its authors)
_GPU_FLOPS = 272e12
# PCIe 5.0 x16, either direction: 51.8 GiB/s for copies of 2 GiB (arXiv 2507.03305's authors, numa-gpu-xfer-bench)
_GPU_LINK_BYTES_PER_S = 51.8 * 2**30
# bf16 matrix products of size 2048, not the block that `calibrate` trains: our own measurement of one thread of an AMD
# EPYC (Zen 4) in a virtual machine, per second of CPU time, median of 9
_CPU_FLOPS_PER_THREAD = 0.187e12


_NEEDED = ("adam_bytes_per_s", "device_read_bytes_per_s", "device_write_bytes_per_s")


class TierSpeeds(NamedTuple):
    values: Mapping[str, Any]  # known fields of `MachineTier`
    origin: str  # source of the speeds that a prediction needs, such as "file and firmware", or "unknown"


def machine_of(
    topology: Topology, device: torch.device | str = "cpu", *, file: str | Path | None = None
) -> Machine | None:
    """Return the machine of a topology; None when a tier has no speeds from any source."""
    device = torch.device(device)
    overrides = Overrides() if file is None else load_overrides(file)
    for name in overrides.tiers:
        topology.tier(name)
    calibration = load_calibration(topology, [each.name for each in devices_apart()])
    speeds = {tier.name: tier_speeds(tier, calibration, overrides) for tier in topology.tiers}
    if any(each.origin == "unknown" for each in speeds.values()):
        return None
    tiers = tuple(_tier(topology, tier, speeds[tier.name].values) for tier in topology.tiers)
    computing, device_origin = _device(device, tiers[0], calibration, overrides)
    ssd = ssd_of(topology, calibration, overrides)
    origins = {name: each.origin for name, each in speeds.items()}
    if ssd is not None:
        from_file = [name in overrides.ssd for name in ("read_bytes_per_s", "write_bytes_per_s")]
        known = ["file"] if any(from_file) else []
        known += [calibration.origin] if calibration is not None and not all(from_file) else []
        origins[SSD] = " and ".join(known) if ssd.has_speeds else "unknown"
    source = "; ".join(f"{name}: {origin}" for name, origin in {**origins, computing.name: device_origin}.items())
    fields: dict[str, Any] = {"name": cpu_model(topology.root or Path("/")), **overrides.machine}
    fields["source"] = f"{source} ({fields['source']})" if "source" in fields else source
    cache = Cache()
    if calibration is not None and calibration.cache_bytes_per_s is not None:
        cache = Cache(nbytes=calibration.cache_bytes, bytes_per_s=calibration.cache_bytes_per_s)
    return Machine(tiers=tiers, device=computing, cache=replace(cache, **overrides.cache), ssd=ssd, **fields)


def machine_without_speeds(topology: Topology, device: torch.device | str = "cpu") -> Machine:
    """Return a machine for policies that look at capacities and kinds only: `Machine.has_speeds` is False."""
    tiers = tuple(_tier(topology, tier, dict.fromkeys(_NEEDED, 1.0)) for tier in topology.tiers)
    computing, _ = _device(torch.device(device), tiers[0], None, Overrides())
    calibration = None if topology.ssd is None else load_calibration(topology, [each.name for each in devices_apart()])
    return Machine(
        name=cpu_model(topology.root or Path("/")),
        tiers=tiers,
        device=replace(computing, flops=1.0, h2d_bytes_per_s=1.0, d2h_bytes_per_s=1.0),
        source="not known",
        has_speeds=False,
        ssd=ssd_of(topology, calibration),
    )


def with_new_tiers(machine: Machine, topology: Topology) -> Machine:
    """Return a machine with the tier that `topology` has got since, because something asked for it by name."""
    added = []
    for tier in topology.tiers:
        if tier.name not in machine.names:
            backing = topology.node_tier(tier.node_ids[0])
            assert backing is not None and tier.emulated  # what is really there was there from the start
            behind = machine.tier(backing.name)
            added.append(replace(behind, name=tier.name, kind=tier.kind, backed_by=backing.name))
    return replace(machine, tiers=(*machine.tiers, *added)) if added else machine


def tier_speeds(tier: Tier, calibration: Calibration | None, overrides: Overrides | None = None) -> TierSpeeds:
    """Return what is known of a tier, field by field from the best source. An emulated one is as fast as its nodes."""
    nodes = tier.near_nodes
    rated: list[tuple[float | None, ...]] = []
    for read, written in ((node.read_bytes_per_s, node.write_bytes_per_s) for node in nodes):
        # Adam's mix, when reading and writing take turns
        mix = (_READ + _WRITTEN) / (_READ / read + _WRITTEN / written) if read and written else None
        rated.append((mix, read, written))
    sources = {"firmware": _of_stripes(tier, rated, tier.read_latency_ns)}
    own = [] if calibration is None else [each for node in nodes if (each := calibration.node(node.node_id))]
    if calibration is not None and len(own) == len(nodes):
        # without a device, the CPUs show what the memory can do
        measured = [
            (each.adam_bytes_per_s, each.h2d_bytes_per_s or each.read_bytes_per_s,
             each.d2h_bytes_per_s or each.write_bytes_per_s)
            for each in own
        ]  # fmt: skip
        latency_ns = max((each.latency_ns for each in own if each.latency_ns is not None), default=None)
        sources[calibration.origin] = _of_stripes(tier, measured, latency_ns)
    if overrides is not None:
        sources["file"] = dict(overrides.tiers.get(tier.name, {}))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, found in sources.items():
        values.update(found)
        origins.update(dict.fromkeys(found, origin))
    known = all(name in values for name in _NEEDED)
    return TierSpeeds(values, " and ".join(dict.fromkeys(origins[name] for name in _NEEDED)) if known else "unknown")


def _of_stripes(tier: Tier, rows: Sequence[Sequence[float | None]], latency_ns: float | None) -> dict[str, Any]:
    """Return the fields of a tier from the `_NEEDED` speeds of its near nodes, each at its part of a stripe."""
    # parts are in proportion to rated read bandwidths where all nodes have one, else equal (`make_leaf`); the node that
    # ends last decides, and where one is unknown, so is the tier
    ratings = [node.read_bytes_per_s for node in tier.near_nodes]
    parts = [rating or 1.0 for rating in ratings] if all(ratings) else [1.0] * len(ratings)
    found = {} if latency_ns is None else {"latency_ns": latency_ns}
    for name, speeds in zip(_NEEDED, zip(*rows, strict=True), strict=True):
        known = [speed for speed in speeds if speed is not None]
        if len(known) == len(parts):
            found[name] = 1 / max(part / sum(parts) / speed for part, speed in zip(parts, known, strict=True))
    return found


def _tier(topology: Topology, tier: Tier, values: Mapping[str, Any]) -> MachineTier:
    backing = topology.node_tier(tier.node_ids[0]) if tier.emulated else None
    fields = {"capacity_bytes": tier.capacity_bytes, "num_nodes": len(tier.near_nodes), **values}
    return MachineTier(name=tier.name, kind=tier.kind, backed_by=None if backing is None else backing.name, **fields)


def _device(
    device: torch.device, nearest: MachineTier, calibration: Calibration | None, overrides: Overrides
) -> tuple[Device, str]:
    if device.type == "cpu":
        values: dict[str, Any] = {
            "name": "cpu",
            "flops": _cpu.available_threads() * _CPU_FLOPS_PER_THREAD,
            # nothing is copied: what the CPU reads and writes is in the nearest tier
            "h2d_bytes_per_s": nearest.device_read_bytes_per_s,
            "d2h_bytes_per_s": nearest.device_write_bytes_per_s,
            "is_host": True,
        }
        origin = "default, as cores of an AMD EPYC (Zen 4)"
    else:
        values = {"name": "gpu", "flops": _GPU_FLOPS}
        values.update(dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), _GPU_LINK_BYTES_PER_S))
        origin = "default, as an H100 with PCIe 5.0 x16"
        found = [each for each in devices_apart() if each.device.type == device.type]
        if (index := device.index or 0) < len(found):
            info = found[index]
            values.update(name=info.name, memory_bytes=info.memory_bytes, count=len(found))
    alike = [each for each in (calibration.devices if calibration is not None else ()) if each.kind == device.type]
    if calibration is not None and (device.index or 0) < len(alike):
        speeds = asdict(alike[device.index or 0])
        measured = ("flops", "h2d_bytes_per_s", "d2h_bytes_per_s", "copy_latency_s")
        values.update({name: speeds[name] for name in measured if speeds[name] is not None})
        origin = f"{calibration.origin}, flops of a Llama block in bf16"
    if overrides.device:
        values.update(overrides.device)
        origin += f", but {', '.join(sorted(overrides.device))}: file"
    return Device(**values), origin
