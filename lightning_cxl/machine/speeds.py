"""The machine at hand with the best speeds that are known, `machine_of`; `Calibration`, what was measured of it.

Each field comes from the first source that has it: a file of the user, the calibration of this very machine (written by
the command ``calibrate``), the firmware's ratings. A tier without a speed leaves the machine unknown.
"""

import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_cxl.cache import cache_folder
from lightning_cxl.devices.device_type import devices_apart
from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.machine.machine import (
    Cache,
    Device,
    Machine,
    MachineSsd,
    MachineTier,
    Overrides,
    Positive,
    Rate,
    Size,
    load_overrides,
    read,
)
from lightning_cxl.machine.nodes import read_text, usable_cpus
from lightning_cxl.machine.topology import Tier, Topology, drive_of, existing_folder
from lightning_cxl.native import _cpu
from lightning_cxl.ssd_options import SSD


def cpu_model(root: Path = Path("/")) -> str:
    """Return the name of the CPUs, the architecture where the kernel does not tell it."""
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def describe_machine(
    topology: Topology, devices: Sequence[str] = (), allowed: frozenset[int] | None = None
) -> dict[str, Any]:
    """Return what speeds depend on, as JSON: CPUs, nodes with the CPUs this process may use, memory, devices.

    Capacities have two digits: kernels keep some memory for themselves, each another amount.

    Args:
        allowed: the CPUs of this process; when None those that `topology` names, else asked from the kernel.
    """
    root = topology.root or Path("/")
    cpus = usable_cpus(root, topology.measured_on if allowed is None else allowed)
    nodes = sorted({node.node_id: node for tier in topology.tiers for node in tier.nodes}.items())
    return {
        "cpu": cpu_model(root),
        "nodes": [
            {"node_id": node_id, "cpus": list(cpus.get(node_id, ())), "gib": f"{node.capacity_bytes / 2**30:.2g}"}
            for node_id, node in nodes
        ],
        "devices": list(devices),
    }


def fingerprint(description: dict[str, Any]) -> str:
    """Return a short name of a description, fit for a file name."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]


QUIET_FRACTION = 0.03
"""When other processes take more than this part of the CPU time, measured numbers are doubtful."""
_VERSION = 1  # of the files; change it when fields change their names or meaning


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpeeds:
    """One NUMA node, used by all CPUs of the process and by all devices."""

    node_id: int
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate
    """With stores that do not read the lines first, as a device writes."""
    adam_bytes_per_s: Rate
    """Bytes read and written per second, 16 to 12."""
    latency_ns: Positive
    """Of a load, from the nearest CPU."""
    h2d_bytes_per_s: Rate | None = None
    """All devices together; None without a device."""
    d2h_bytes_per_s: Rate | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeeds:
    """One device, alone; the CPU has no copies."""

    kind: str
    """``"cpu"``, ``"cuda"`` or another type of ``torch.device``."""
    name: str
    flops: Positive
    """Of bf16 matrix products, the fastest size."""
    h2d_bytes_per_s: Rate | None = None
    d2h_bytes_per_s: Rate | None = None
    copy_latency_s: Positive | None = None
    """A copy of a few bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdSpeeds:
    """Large sequential accesses to one folder."""

    folder: str
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate
    direct: bool
    """Past the page cache; False where the file system cannot do that, then the numbers are partly memory's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """All that was measured in one run."""

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
        """Whether other processes disturbed it."""
        return self.others_fraction > QUIET_FRACTION

    def node(self, node_id: int) -> NodeSpeeds | None:
        """Return the speeds of a node, None when it was not measured."""
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def device(self, kind: str, index: int = 0) -> DeviceSpeeds | None:
        """Return the speeds of a device, None when it was not measured."""
        found = [device for device in self.devices if device.kind == kind]
        return found[index] if index < len(found) else None


def calibration_path(topology: Topology, devices: Sequence[str]) -> Path:
    """Return where the calibration of a machine is kept, whether there is one or not."""
    return cache_folder() / "calibration" / f"{fingerprint(describe_machine(topology, devices))}.json"


def save_calibration(calibration: Calibration, topology: Topology, devices: Sequence[str]) -> Path:
    """Keep what was measured on this machine; readers see the old file or the new one, whole.

    Returns:
        The file.
    """
    path = calibration_path(topology, devices)
    content = {"version": _VERSION, "machine": describe_machine(topology, devices), "speeds": asdict(calibration)}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
    return path


def load_calibration(topology: Topology, devices: Sequence[str]) -> Calibration | None:
    """Return what was measured on this very machine; None when nothing was, or the machine is invented.

    A file that cannot be used is left out with a warning.
    """
    if topology.root is None:
        return None
    path = calibration_path(topology, devices)
    try:
        content = json.loads(path.read_text())
        if content["version"] != _VERSION:
            raise ValueError(f"its version is {content['version']}, this program writes {_VERSION}")
        if content["machine"] != describe_machine(topology, devices):
            raise ValueError("it is of another machine")
        return read(Calibration, content["speeds"], "what was measured")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(
            f"the measured speeds in {path} are not used ({type(error).__name__}: {error}). Measure again: `python -m "
            "lightning_cxl calibrate`.",
            LightningCXLWarning,
            stacklevel=2,
        )
        return None


def ssd_of(
    topology: Topology, calibration: Calibration | None = None, overrides: Overrides | None = None
) -> MachineSsd | None:
    """Return the tier `ssd` of a topology; None where it has none.

    Speeds are those of a user's file, else those that ``calibrate --ssd`` has measured in the tier's folders, or
    elsewhere on the same drives. Parts of a record are read and written on all drives at once, so the slowest drive
    decides. No speed is known as long as one drive was not measured.
    """
    tier, overrides = topology.ssd, overrides or Overrides()
    if tier is None:
        return None
    values: dict[str, Any] = {} if calibration is None else _measured_drives(tier.folders, calibration.ssds)
    values |= overrides.ssd
    values["capacity_bytes"] = min(tier.capacity_bytes, overrides.ssd.get("capacity_bytes", tier.capacity_bytes))
    return MachineSsd(num_drives=len(tier.folders), versions=tier.versions, **values)


def ssd_origin(ssd: MachineSsd, calibration: Calibration | None, overrides: Overrides) -> str:
    """Return where the speeds of a tier `ssd` that `ssd_of` has made come from."""
    if not ssd.has_speeds:
        return "unknown"
    from_file = [name in overrides.ssd for name in ("read_bytes_per_s", "write_bytes_per_s")]
    origins = ["file"] if any(from_file) else []
    return " and ".join(origins + ([calibration.origin] if calibration is not None and not all(from_file) else []))


def _measured_drives(folders: Sequence[Path], ssds: Sequence[SsdSpeeds]) -> dict[str, float]:
    drives = [drive_of(existing_folder(folder)) for folder in folders]
    sharing = Counter(drives)
    reads, writes = [], []
    for folder, drive in zip(folders, drives, strict=True):
        found = _speeds_of(folder, drive, ssds)
        if found is None:
            return {}
        reads.append(found.read_bytes_per_s / sharing[drive])
        writes.append(found.write_bytes_per_s / sharing[drive])
    return {"read_bytes_per_s": len(folders) * min(reads), "write_bytes_per_s": len(folders) * min(writes)}


def _speeds_of(folder: Path, drive: int, ssds: Sequence[SsdSpeeds]) -> SsdSpeeds | None:
    """Return what was measured in a folder, else elsewhere on its drive."""
    there = [each for each in ssds if Path(each.folder).is_dir() and drive_of(Path(each.folder)) == drive]
    return next((each for each in there if Path(each.folder) == folder.resolve()), next(iter(there), None))


_READ, _WRITTEN = 16, 12  # bytes per element of Adam's mix

# Without a calibration. Training a 7B model on one H100: 272 TFLOP/s (arXiv 2604.05091, by its authors)
_GPU_FLOPS = 272e12
# PCIe 5.0 x16, either direction: 51.8 GiB/s for copies of 2 GiB (arXiv 2507.03305's authors, numa-gpu-xfer-bench)
_GPU_LINK_BYTES_PER_S = 51.8 * 2**30
# bf16 matrix products of size 2048: our own measurement of one thread of an AMD EPYC (Zen 4) in a virtual machine, per
# second of CPU time, median of 9
_CPU_FLOPS_PER_THREAD = 0.187e12


@dataclass(frozen=True, slots=True)
class TierSpeeds:
    """The known speeds of a tier: fields of `MachineTier`, and where each comes from."""

    values: Mapping[str, Any]
    origins: Mapping[str, str]

    @property
    def known(self) -> bool:
        """Whether all speeds are known that a prediction needs."""
        return all(name in self.values for name in _NEEDED)

    @property
    def origin(self) -> str:
        """Source of the speeds, e.g. ``"file and firmware"``, or ``"unknown"``."""
        if not self.known:
            return "unknown"
        return " and ".join(dict.fromkeys(self.origins[name] for name in _NEEDED))


_NEEDED = ("adam_bytes_per_s", "device_read_bytes_per_s", "device_write_bytes_per_s")


def machine_of(
    topology: Topology,
    device: torch.device | str = "cpu",
    *,
    file: str | Path | None = None,
    capacity_bytes: Mapping[str, int] | None = None,
) -> Machine | None:
    """Return the machine of a topology; None when a tier has no speeds from any source.

    Args:
        topology: what was detected; an invented one has no calibration and no ratings.
        capacity_bytes: what a job may use, by tier: budgets, or what is free. Otherwise the file's, or the physical
            capacity; of both, the smaller.
    """
    device = torch.device(device)
    overrides = Overrides() if file is None else load_overrides(file)
    for name in (*overrides.tiers, *(capacity_bytes or ())):
        topology.tier(name)
    calibration = load_calibration(topology, [each.name for each in devices_apart()])
    speeds = {tier.name: tier_speeds(tier, calibration, overrides) for tier in topology.tiers}
    if not all(each.known for each in speeds.values()):
        return None
    tiers = tuple(_tier(topology, tier, speeds[tier.name], capacity_bytes or {}) for tier in topology.tiers)
    computing, device_origin = _device(device, tiers[0], calibration, overrides)
    ssd = ssd_of(topology, calibration, overrides)
    origins = {name: each.origin for name, each in speeds.items()}
    if ssd is not None:
        origins[SSD] = ssd_origin(ssd, calibration, overrides)
    source = "; ".join(f"{name}: {origin}" for name, origin in {**origins, computing.name: device_origin}.items())
    fields: dict[str, Any] = {"name": cpu_model(topology.root or Path("/")), **overrides.machine}
    fields["source"] = f"{source} ({fields['source']})" if "source" in fields else source
    cache = _cache(calibration, overrides)
    return Machine(tiers=tiers, device=computing, cache=cache, ssd=ssd, **fields)


def machine_without_speeds(topology: Topology, device: torch.device | str = "cpu") -> Machine:
    """Return a machine for policies that look at capacities and kinds only: `Machine.has_speeds` is False."""
    placeholders = TierSpeeds(dict.fromkeys(_NEEDED, 1.0), {})
    tiers = tuple(_tier(topology, tier, placeholders, {}) for tier in topology.tiers)
    computing, _ = _device(torch.device(device), tiers[0], None, Overrides())
    has_ssd = topology.ssd is not None
    calibration = load_calibration(topology, [each.name for each in devices_apart()]) if has_ssd else None
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
    sources = {"firmware": _rated(tier)}
    if calibration is not None:
        sources[calibration.origin] = _measured(tier, calibration)
    if overrides is not None:
        sources["file"] = dict(overrides.tiers.get(tier.name, {}))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, found in sources.items():
        values.update(found)
        origins.update(dict.fromkeys(found, origin))
    return TierSpeeds(values, origins)


def adam_mix(read_bytes_per_s: float, write_bytes_per_s: float) -> float:
    """Return the bandwidth of Adam's mix when reading and writing take turns."""
    return (_READ + _WRITTEN) / (_READ / read_bytes_per_s + _WRITTEN / write_bytes_per_s)


def _rated(tier: Tier) -> dict[str, float]:
    """Return fields from the firmware's ratings of the nodes; those that a node lacks are left out."""
    reads = [node.read_bytes_per_s for node in tier.near_nodes]
    writes = [node.write_bytes_per_s for node in tier.near_nodes]
    mixes = [adam_mix(r, w) if r and w else None for r, w in zip(reads, writes, strict=True)]
    found = {
        "adam_bytes_per_s": _together(tier, mixes),
        "device_read_bytes_per_s": _together(tier, reads),
        "device_write_bytes_per_s": _together(tier, writes),
        "latency_ns": tier.read_latency_ns,
    }
    return {name: value for name, value in found.items() if value is not None}


def _measured(tier: Tier, calibration: Calibration) -> dict[str, float]:
    """Return fields from measurements of the nodes; without a device, the CPUs show what the memory can do."""
    nodes = [speeds for node in tier.near_nodes if (speeds := calibration.node(node.node_id)) is not None]
    if len(nodes) < len(tier.near_nodes):
        return {}
    found = {
        "adam_bytes_per_s": _together(tier, [node.adam_bytes_per_s for node in nodes]),
        "device_read_bytes_per_s": _together(tier, [node.h2d_bytes_per_s or node.read_bytes_per_s for node in nodes]),
        "device_write_bytes_per_s": _together(tier, [node.d2h_bytes_per_s or node.write_bytes_per_s for node in nodes]),
        "latency_ns": max(node.latency_ns for node in nodes),
    }
    return {name: value for name, value in found.items() if value is not None}


def _together(tier: Tier, speeds: Sequence[float | None]) -> float | None:
    """Return the speed of near nodes, each at its part of a stripe: who ends last decides. None when one is not known.

    A tier's stripes have parts in proportion to rated read bandwidths where all nodes have one, else equal parts
    (`lightning_cxl.memory.host_memory.make_leaf`).
    """
    ratings = [node.read_bytes_per_s for node in tier.near_nodes]
    parts = [rating or 1.0 for rating in ratings] if all(ratings) else [1.0] * len(ratings)
    slowest = 0.0
    for part, speed in zip(parts, speeds, strict=True):
        if speed is None:
            return None
        slowest = max(slowest, part / sum(parts) / speed)
    return 1 / slowest


def _tier(topology: Topology, tier: Tier, speeds: TierSpeeds, capacity_bytes: Mapping[str, int]) -> MachineTier:
    values = dict(speeds.values)
    limits = [values.pop("capacity_bytes", None), capacity_bytes.get(tier.name)]
    backing = topology.node_tier(tier.node_ids[0]) if tier.emulated else None
    return MachineTier(
        name=tier.name,
        kind=tier.kind,
        capacity_bytes=min((limit for limit in limits if limit is not None), default=tier.capacity_bytes),
        num_nodes=len(tier.near_nodes),
        backed_by=None if backing is None else backing.name,
        **values,
    )


def _device(
    device: torch.device, nearest: MachineTier, calibration: Calibration | None, overrides: Overrides
) -> tuple[Device, str]:
    """Return the device with the best that is known, and where its speeds come from."""
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
    speeds = None if calibration is None else calibration.device(device.type, device.index or 0)
    if calibration is not None and speeds is not None:
        measured = ("flops", "h2d_bytes_per_s", "d2h_bytes_per_s", "copy_latency_s")
        values.update({name: getattr(speeds, name) for name in measured if getattr(speeds, name) is not None})
        origin = f"{calibration.origin}, flops of bf16 matrix products"
    if overrides.device:
        values.update(overrides.device)
        origin += f", but {', '.join(sorted(overrides.device))}: file"
    return Device(**values), origin


def _cache(calibration: Calibration | None, overrides: Overrides) -> Cache:
    values: dict[str, Any] = {}
    if calibration is not None and calibration.cache_bytes_per_s is not None:
        values = {"nbytes": calibration.cache_bytes, "bytes_per_s": calibration.cache_bytes_per_s}
    return Cache(**{**values, **overrides.cache})
