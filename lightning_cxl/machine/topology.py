"""The host's memory tiers: what there is (`Tier`, `Topology`) and how much of it is free."""

import contextlib
import enum
import logging
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lightning_cxl.errors import ConfigError, MissingTierWarning, TierNotFoundError
from lightning_cxl.machine import nodes
from lightning_cxl.machine.nodes import Node
from lightning_cxl.ssd_options import SSD, SsdOptions
from lightning_cxl.units import format_bytes, parse_bytes

# ----------------------------------------------------------------------------------------------------
# How much the tier `ssd` may hold: its budget, or what is free on its drives.

log = logging.getLogger(__name__)

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_ON_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse")
_BLOCKS = Path("/sys/dev/block")
_USED = 0.98  # of what is free: a file system needs some for itself, and slows down when it is full


def ssd_capacity_bytes(options: SsdOptions) -> int:
    """Return the bytes that the tier may take on all drives together.

    Records are cut evenly over the drives, so without a budget the drive with least free space decides. Folders on one
    file system share what is free there. A folder that does not exist yet counts as the nearest one around it.
    """
    folders = [existing_folder(path) for path in options.paths]
    for folder in folders:
        _check_kind(folder)
    if options.budget_bytes is not None:
        return options.budget_bytes
    drives = Counter(map(drive_of, folders))
    least = min(_free_bytes(folder) // drives[drive_of(folder)] for folder in folders)
    return int(least * len(folders) * _USED)


def drive_of(folder: Path) -> int:
    """Return what tells drives apart: the device of the file system."""
    return os.stat(folder).st_dev


def existing_folder(path: Path) -> Path:
    """Return a folder, or where it does not exist yet, the nearest one around it."""
    for folder in (path, *path.parents):
        if folder.exists():
            if folder.is_dir():
                return folder
            break
    raise ConfigError(f'tiers: the path {path} of "ssd" is no folder: {folder} is something else')


def filesystem_of(folder: Path) -> str:
    """Return the type of the filesystem that a folder lies on, such as ``"ext4"``; empty where it is not known."""
    number = _device_numbers(drive_of(folder))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        of_mount, _, of_filesystem = line.partition(" - ")
        if of_mount.split()[2] == number:
            return of_filesystem.split()[0]
    return ""


def _check_kind(folder: Path) -> None:
    kind = filesystem_of(folder)
    if kind in _IN_MEMORY:
        raise ConfigError(
            f'tiers: the path of "ssd" lies in memory: `{folder}` is on {kind}. Give a folder on a drive; `df -T` says '
            f"what folders are on"
        )
    if kind.partition(".")[0] in _ON_NETWORK:
        log.warning(f"tier ssd: `{folder}` is on {kind}: all state goes through it in every step; use a local drive")
    if speed := _rotations_per_minute(folder):
        log.warning(f"tier ssd: `{folder}` is on a disk that rotates ({speed} rpm): every step waits for it")


def _rotations_per_minute(folder: Path) -> int:
    """Return how fast a disk says that it rotates; 0 where it does not: for Linux virtual ones rotate, too."""
    block = (_BLOCKS / _device_numbers(drive_of(folder))).resolve()
    slaves = (*block.glob("slaves/*"), *block.glob("slaves/*/slaves/*"))  # of LVM, RAID and encryption
    below = [each.resolve() for each in slaves]
    speeds = [0]
    for disk in (disk for each in (block, *below) for disk in (each, each.parent)):  # of a partition
        with contextlib.suppress(OSError):
            speeds.append(int.from_bytes((disk / "device/vpd_pgb1").read_bytes()[4:6]))
    return max(speed for speed in speeds if speed == 0 or 0x400 < speed < 0xFFFF)


def _device_numbers(drive: int) -> str:
    return f"{os.major(drive)}:{os.minor(drive)}"


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


__all__ = ["Node", "Tier", "TierKind", "Topology"]

_CXL = "cxl"
_ADDING = threading.Lock()
_NOT_THE_CALLER = (f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__)


class TierKind(enum.Enum):
    """The kind of memory of a tier, fastest first."""

    GPU = "gpu"
    DRAM = "dram"
    CXL = "cxl"
    SSD = "ssd"


@dataclass(frozen=True, slots=True)
class Tier:
    """One or more NUMA nodes that are used as one memory, nearest node first; or for the tier `ssd`, files."""

    name: str
    kind: TierKind
    nodes: tuple[Node, ...]
    emulated: bool = False
    """No such hardware here: the nodes are another tier's, so that programs written for it run anyway."""
    folders: tuple[Path, ...] = ()
    """Folders of the files of the tier `ssd`, one per drive; a tier of memory has none."""
    file_bytes: int = 0
    """Capacity of these files together."""
    versions: int = 1
    """How often every byte lies in these files: 2 where checkpoints refer to it."""
    nearest_first: bool = False
    """Nodes that are further away get bytes only when the nearer ones are full; otherwise all nodes are striped."""

    @property
    def node_ids(self) -> tuple[int, ...]:
        """Ids of the nodes, nearest first."""
        return tuple(node.node_id for node in self.nodes)

    @property
    def near_nodes(self) -> tuple[Node, ...]:
        """The nodes that hold the tier's bytes while they have room, in stripes."""
        return tuple(n for n in self.nodes if not self.nearest_first or n.distance == self.nodes[0].distance)

    @property
    def capacity_bytes(self) -> int:
        """Physical memory of all nodes; of the tier `ssd`, its budget or what was free on its drives."""
        return self.file_bytes + sum(node.capacity_bytes for node in self.nodes)

    @property
    def read_bytes_per_s(self) -> float | None:
        """Rated read bandwidth of the near nodes together; None when the firmware leaves out one of them."""
        return _sum_or_none([node.read_bytes_per_s for node in self.near_nodes])

    @property
    def write_bytes_per_s(self) -> float | None:
        """Rated write bandwidth of the near nodes together; None when the firmware leaves out one of them."""
        return _sum_or_none([node.write_bytes_per_s for node in self.near_nodes])

    @property
    def read_latency_ns(self) -> float | None:
        """Rated read latency of the slowest near node; None when the firmware leaves out one of them."""
        latencies = [node.read_latency_ns for node in self.near_nodes if node.read_latency_ns is not None]
        return max(latencies) if latencies and len(latencies) == len(self.near_nodes) else None

    def describe(self) -> str:
        """Return one line, e.g. ``"cxl: 2.0 GiB on nodes 1, 2 (57.3 GB/s read, 250 ns)"``."""
        if self.folders:
            return f"{self.name}: {format_bytes(self.capacity_bytes)} in {', '.join(map(str, self.folders))}"
        ids = ", ".join(map(str, self.node_ids))
        text = f"{self.name}: {format_bytes(self.capacity_bytes)} on node{'s' if len(self.nodes) > 1 else ''} {ids}"
        text += ", nearest first" if self.nearest_first else ""
        speeds = [f"{self.read_bytes_per_s / 1e9:.1f} GB/s read"] if self.read_bytes_per_s is not None else []
        speeds += [f"{self.read_latency_ns:.0f} ns"] if self.read_latency_ns is not None else []
        text += f" ({', '.join(speeds)})" if speeds else ""
        return text + (" [emulated: backed by DRAM]" if self.emulated else "")


@dataclass(frozen=True, eq=False, slots=True)
class Topology:
    """The tiers of a host: of memory, nearest first, and `ssd` where a user has named a folder for it.

    Without CXL memory there is one tier, ``dram``. A request for the tier ``cxl`` by name then gets DRAM under that
    name, with one warning, and from then on it is one of `tiers`. Topologies of the same hardware are equal, whether
    that tier was asked for or not.
    """

    tiers: tuple[Tier, ...]
    """Of memory."""
    root: Path | None = None
    """Where ``sys`` and ``proc`` were read; None for an invented machine, all of whose memory counts as free."""
    notes: tuple[str, ...] = ()
    """Nodes that detection left out, and why, one sentence each."""
    backs_cxl: bool = False
    """Whether DRAM may stand in for CXL memory that is asked for and missing."""
    ssd: Tier | None = None
    """The tier `ssd`. It is none of `tiers`: no memory is had from it, and nothing spills to it."""
    measured_on: frozenset[int] | None = None
    """The CPUs that this process had before it was bound to some of them: speeds of the machine are looked up by these.
    None: those that it has."""

    @classmethod
    def detect(
        cls, root: str | os.PathLike[str] = "/", *, on_missing_tier: Literal["fallback", "error"] = "fallback"
    ) -> "Topology":
        """Read the machine: nodes with CPUs are tier ``dram``, memory-only nodes tier ``cxl`` (striped over several).

        Nodes that the process's cpuset forbids are left out and named in `notes`.

        Args:
            root: where ``sys`` and ``proc`` lie; for tests.
            on_missing_tier: without memory-only nodes, back ``cxl`` by DRAM, with one warning, when something asks for
                it by name; or refuse now.

        Raises:
            TierNotFoundError: no memory-only node and ``"error"``, or no usable node at all.
        """
        if on_missing_tier not in ("fallback", "error"):
            raise ConfigError(f'on_missing_tier must be "fallback" or "error", got {on_missing_tier!r}')
        root = Path(root)
        allowed = nodes.allowed_node_ids(root)
        found = [node for node in nodes.read_nodes(root) if node.capacity_bytes > 0]
        of_gpus = nodes.gpu_node_ids(root)
        found = [node for node in found if node.node_id not in of_gpus]  # torch allocates from them
        usable = [node for node in found if allowed is None or node.node_id in allowed]
        notes = tuple(
            f"node {node.node_id} ({'DRAM' if node.has_cpus else 'CXL'}, {format_bytes(node.capacity_bytes)}) is left "
            f"out: this process's cpuset does not allow it"
            for node in found
            if node not in usable
        )
        if not usable:
            raise TierNotFoundError(
                f"no NUMA node is usable: {len(found)} with memory under {root}, and the cpuset allows "
                f"{sorted(allowed or ())}. Start the process in a cpuset with memory nodes."
            )
        topology = cls(_group(usable), root, notes, backs_cxl=True)
        if on_missing_tier == "error" and not topology.select(kind=TierKind.CXL):
            raise TierNotFoundError(
                f"there is no CXL memory: {topology._why_no_cxl()}. This machine has: {topology.tiers[0].describe()}. "
                f"Bring the card online (`daxctl online-memory --no-movable`), or back tier 'cxl' by DRAM with "
                f"on_missing_tier='fallback'."
            )
        return topology

    @classmethod
    def fake(
        cls, dram: Sequence[int | str] = ("64GiB",), cxl: Sequence[int | str] = ("256GiB", "256GiB")
    ) -> "Topology":
        """Invent a machine with one node per size, ids in order; with no `cxl` size it has no CXL memory.

        Raises:
            ConfigError: no DRAM node.
        """
        if not dram:
            raise ConfigError("an invented machine needs at least one DRAM node, such as dram=('64GiB',)")
        sizes = [(True, size) for size in dram] + [(False, size) for size in cxl]
        made = [
            Node(node_id, has_cpus, parse_bytes(size), 10 if has_cpus else 24)
            for node_id, (has_cpus, size) in enumerate(sizes)
        ]
        return cls(_group(made), backs_cxl=True)

    def __eq__(self, other: object) -> bool:
        """Whether the other topology is of the same hardware."""
        return self._hardware() == other._hardware() if isinstance(other, Topology) else NotImplemented

    def __hash__(self) -> int:
        """Return what stays the same when something asks for ``cxl``."""
        return hash(self._hardware())

    def with_ssd(self, options: SsdOptions) -> "Topology":
        """Return this machine with the tier `ssd`.

        Raises:
            ConfigError: a path is no folder.
        """
        tier = Tier(
            SSD,
            TierKind.SSD,
            (),
            folders=options.paths,
            file_bytes=ssd_capacity_bytes(options),
            versions=options.versions,
        )
        return replace(self, ssd=tier)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tiers of memory, nearest first."""
        return tuple(tier.name for tier in self.tiers)

    def select(self, *, kind: TierKind) -> tuple[Tier, ...]:
        """Return the tiers of a kind, nearest first."""
        return tuple(tier for tier in self._all_tiers() if tier.kind is kind)

    def tier(self, name: str) -> Tier:
        """Return the tier of that name; DRAM in place of CXL memory that this machine does not have.

        Raises:
            TierNotFoundError: there is none; the message names those that exist.
        """
        for tier in self._all_tiers():
            if tier.name == name:
                return tier
        if name == _CXL and self.backs_cxl:
            return self._add_cxl()
        raise TierNotFoundError(f"there is no tier {name!r}; {self.what_there_is(name)}")

    def what_there_is(self, missing: str) -> str:
        """Return the end of a message about a tier that is missing: those that there are, and how to have this one."""
        text = f"this machine has: {', '.join(repr(tier.name) for tier in self._all_tiers())}"
        if missing == SSD:
            text += '. Name a folder for it: tiers={"ssd": {"path": "/nvme/run"}}'
        return text

    def node_tier(self, node_id: int) -> Tier | None:
        """Return the first tier that really has the node (an emulated one never does), None for an unknown node."""
        for tier in self.tiers:
            if not tier.emulated and node_id in tier.node_ids:
                return tier
        return None

    def node_free_bytes(self, node_id: int) -> int:
        """Return what this process can still take from a node now: free or droppable there, less some head-room.

        Control groups count too: a group close to its limit makes every node look that full, because the kernel kills
        a process that goes beyond, wherever the pages are.
        """
        capacity = next((n.capacity_bytes for t in self.tiers for n in t.nodes if n.node_id == node_id), None)
        if capacity is None:
            known = sorted({i for tier in self.tiers for i in tier.node_ids})
            raise ConfigError(f"there is no usable node {node_id}; this machine has nodes {known}")
        if self.root is None:
            return capacity
        return min(nodes.node_free_bytes(self.root, node_id, capacity), nodes.host_available_bytes(self.root))

    def host_limit_bytes(self) -> int:
        """Return the most host memory this process can ever use: physical memory or a control group's limit."""
        return self._real_capacity_bytes() if self.root is None else nodes.host_limit_bytes(self.root)

    def host_available_bytes(self) -> int:
        """Return the host memory this process can take now: MemAvailable or what a control group leaves of it."""
        return self._real_capacity_bytes() if self.root is None else nodes.host_available_bytes(self.root)

    def describe(self) -> str:
        """Return the tiers and notes, one line each."""
        return "\n".join([*(tier.describe() for tier in self._all_tiers()), *self.notes])

    def _all_tiers(self) -> tuple[Tier, ...]:
        return self.tiers if self.ssd is None else (*self.tiers, self.ssd)

    def _real_capacity_bytes(self) -> int:
        return sum(tier.capacity_bytes for tier in self.tiers if not tier.emulated)

    def _why_no_cxl(self) -> str:
        return "; ".join(self.notes) or "no memory-only NUMA node is online"

    def _add_cxl(self) -> Tier:
        backing = self.tiers[0]
        added = replace(backing, name=_CXL, kind=TierKind.CXL, emulated=True)
        with _ADDING:
            if _CXL in self.names:  # another thread was faster
                return added
            object.__setattr__(self, "tiers", (*self.tiers, added))
        warnings.warn(
            f"there is no CXL memory ({self._why_no_cxl()}): tier 'cxl' is backed by DRAM on node "
            f"{', '.join(map(str, backing.node_ids))}. Set on_missing_tier='error' to refuse instead.",
            MissingTierWarning,
            stacklevel=_level_of_caller(),
        )
        return added

    def _hardware(self) -> tuple[object, ...]:
        real = tuple(tier for tier in self.tiers if not tier.emulated)
        return real, self.root, self.notes, self.backs_cxl, self.ssd


def _level_of_caller() -> int:
    """Return the ``stacklevel`` of a warning that the calling function makes about the line that called this package.

    The file of ``with`` blocks is passed over, too: it lies between `host_allocation` and the line of the user.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_NOT_THE_CALLER) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def _group(usable: Sequence[Node]) -> tuple[Tier, ...]:
    """Group nodes into the tiers ``dram`` and ``cxl``; a tier without nodes is left out."""
    by_distance = sorted(usable, key=lambda node: (node.distance, node.node_id))
    dram = Tier("dram", TierKind.DRAM, tuple(node for node in by_distance if node.has_cpus))
    cxl = Tier(_CXL, TierKind.CXL, tuple(node for node in by_distance if not node.has_cpus))
    return tuple(tier for tier in (dram, cxl) if tier.nodes)


def _sum_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
