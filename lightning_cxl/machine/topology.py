"""The host's memory tiers: what there is (`Tier`, `Topology`) and how much of it is free."""

import enum
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from lightning_cxl.config import SSD, SsdOptions
from lightning_cxl.errors import ConfigError, MissingTierWarning, TierNotFoundError, warn
from lightning_cxl.text import format_bytes

# The machine's NUMA nodes, CPUs and memory limits, as the kernel describes them under ``/sys`` and ``/proc``.

_NODES = "sys/devices/system/node"
_HEADROOM_MIN_BYTES = 16 << 20
_HEADROOM_MAX_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node that has memory; speeds are the firmware's ratings from the nearest CPU, None where it has none."""

    node_id: int
    has_cpus: bool
    capacity_bytes: int
    distance: int = 10
    """SLIT distance from the nearest node with CPUs; 10 is local."""
    movable: bool = False
    """All its memory is in ZONE_MOVABLE: long-term pins (a GPU driver's) migrate pages away from it."""
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    read_latency_ns: float | None = None
    write_latency_ns: float | None = None


def parse_id_list(text: str) -> tuple[int, ...]:
    ids: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            ids.extend(range(int(first), int(last or first) + 1))
    return tuple(ids)


def read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def read_ids(path: Path) -> tuple[int, ...]:
    return parse_id_list(read_text(path) or "")


def read_meminfo(path: Path) -> dict[str, int]:
    """Return the bytes of every field of a meminfo file, the machine's or one node's."""
    fields: dict[str, int] = {}
    for line in (read_text(path) or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words:
            fields[name.split()[-1]] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return fields


def memory_pressure(root: Path = Path("/")) -> dict[str, float]:
    """Return ``memory_pressure_pct`` (of the last 10 s, in which some thread waited for memory) and ``moved_pages``.

    The kernel counts pages that it has moved from node to node since it began; what it does not count is left out.
    """
    found = {}
    if (some := re.search(r"^some avg10=([\d.]+)", read_text(root / "proc/pressure/memory") or "")) is not None:
        found["memory_pressure_pct"] = float(some[1])
    vmstat = read_text(root / "proc/vmstat") or ""
    if (moved := re.search(r"^(?:numa_pages_migrated|pgmigrate_success) (\d+)$", vmstat, re.MULTILINE)) is not None:
        found["moved_pages"] = float(moved[1])
    return found


def allowed_node_ids(root: Path) -> frozenset[int] | None:
    found = re.search(r"^Mems_allowed_list:(.*)$", read_text(root / "proc/self/status") or "", re.MULTILINE)
    return None if found is None else frozenset(parse_id_list(found[1]))


def read_nodes(root: Path) -> tuple[Node, ...]:
    """Return every online node that has memory, by id. A kernel without NUMA shows as node 0 with CPUs."""
    node_ids = read_ids(root / _NODES / "has_memory")
    base = root / _NODES
    machine = read_meminfo(root / "proc/meminfo").get("MemTotal", 0)
    if not node_ids:
        return (Node(0, True, machine),)
    # memory that a hypervisor plugged in late is in /proc/meminfo but not always in the node's own file
    capacities = {node: read_meminfo(base / f"node{node}/meminfo").get("MemTotal", 0) for node in node_ids}
    if len(node_ids) == 1:
        capacities = dict.fromkeys(node_ids, machine)
    online = online_node_ids(root) or node_ids
    cpu_ids = frozenset(node_id for node_id, cpus in node_cpus(root, online).items() if cpus)
    distances = node_distances(root, online)
    normal = read_text(base / "has_normal_memory")
    normal_ids = node_ids if normal is None else parse_id_list(normal)
    return tuple(
        Node(
            node_id=node_id,
            has_cpus=node_id in cpu_ids,
            capacity_bytes=capacities[node_id],
            distance=min((d for other, d in distances.get(node_id, {}).items() if other in cpu_ids), default=10),
            movable=node_id not in normal_ids,
            read_bytes_per_s=_rating(base / f"node{node_id}", "read_bandwidth", 1e6),
            write_bytes_per_s=_rating(base / f"node{node_id}", "write_bandwidth", 1e6),
            read_latency_ns=_rating(base / f"node{node_id}", "read_latency", 1.0),
            write_latency_ns=_rating(base / f"node{node_id}", "write_latency", 1.0),
        )
        for node_id in node_ids
    )


def node_free_bytes(root: Path, node_id: int, capacity_bytes: int) -> int:
    # free memory and the file cache that the kernel gives up under pressure, less head-room for the kernel and others;
    # on a machine with a single node the kernel's own estimate, MemAvailable; none of a node that was taken offline
    headroom = min(max(capacity_bytes // 64, _HEADROOM_MIN_BYTES), _HEADROOM_MAX_BYTES)
    if read_ids(root / _NODES / "has_memory") not in ((), (node_id,)):
        fields = read_meminfo(root / _NODES / f"node{node_id}/meminfo")
        free = fields.get("MemFree", 0) + fields.get("Active(file)", 0) + fields.get("Inactive(file)", 0)
    else:
        free = read_meminfo(root / "proc/meminfo").get("MemAvailable", 0)
    return max(0, free - headroom)


def online_node_ids(root: Path) -> tuple[int, ...]:
    return read_ids(root / _NODES / "online")


def node_cpus(root: Path, node_ids: Sequence[int]) -> dict[int, tuple[int, ...]]:
    return {node: read_ids(root / _NODES / f"node{node}/cpulist") for node in node_ids}


def node_distances(root: Path, online: Sequence[int]) -> dict[int, dict[int, int]]:
    """Return the SLIT distances from every online node to every other; the columns of a node are the online nodes."""
    found = {}
    for node in online:
        words = (read_text(root / _NODES / f"node{node}/distance") or "").split()
        found[node] = {other: int(word) for other, word in zip(online, words, strict=False)}
    return found


def _rating(node: Path, name: str, factor: float) -> float | None:
    """Return a rating of access class 1 (from the nearest CPU), else 0 (from the nearest initiator of any kind).

    Bandwidths are in MB/s by the kernel's stable ABI document (numaperf.rst says MiB/s: 4.9 % apart).
    """
    for access in ("access1", "access0"):
        text = read_text(node / access / "initiators" / name)
        if text and int(text) > 0:
            return int(text) * factor
    return None


def usable_cpus(root: Path = Path("/"), allowed: frozenset[int] | None = None) -> dict[int, tuple[int, ...]]:
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    by_node = node_cpus(root, online_node_ids(root))
    usable = {node: tuple(cpu for cpu in cpus if cpu in allowed) for node, cpus in by_node.items()}
    return {node: cpus for node, cpus in usable.items() if cpus}


def nearest_cpu_nodes(root: Path, cpu_nodes: frozenset[int]) -> dict[int, int]:
    nearest = {}
    for node, distances in node_distances(root, online_node_ids(root)).items():
        candidates = [(distance, other) for other, distance in distances.items() if other in cpu_nodes]
        if candidates:
            nearest[node] = min(candidates)[1]
    return nearest


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One control group's limit on memory, and what its members use of it (file cache that can be dropped excluded)."""

    path: Path
    limit_bytes: int
    used_bytes: int


def cgroup_limits(root: Path) -> tuple[MemoryLimit, ...]:
    # Inside a container the path named in /proc/self/cgroup may lie outside what is mounted: folders that do not exist
    # are skipped, and the mount's top (then the container's own group) is always read
    limits = []
    names: tuple[str, ...]
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            mount, names, current, prefix = root / "sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", ""
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes",)
            current, prefix = "memory.usage_in_bytes", "total_"
        else:
            continue
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for depth in range(len(parts), -1, -1):
            group = mount.joinpath(*parts[:depth])
            found = [int(text) for name in names if (text := read_text(group / name)) and text.isdigit()]
            # v1 writes "no limit" as the largest multiple of the page size below 2^63
            found = [limit for limit in found if limit < 1 << 62]
            if found:
                stat = dict(line.split() for line in (read_text(group / "memory.stat") or "").splitlines())
                droppable = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                used = int(read_text(group / current) or 0) - droppable
                limits.append(MemoryLimit(group, min(found), max(0, used)))
    return tuple(limits)


log = logging.getLogger(__name__)

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_ON_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse")
_USED = 0.98  # of what is free: a file system needs some for itself, and slows down when it is full


def ssd_capacity_bytes(options: SsdOptions) -> int:
    # records are cut evenly over drives, so without a budget the drive with least free space decides; folders on one
    # file system share what is free there
    folders = [existing_folder(path) for path in options.paths]
    for folder in folders:
        kind = filesystem_of(folder)
        if kind in _IN_MEMORY:
            raise ConfigError(
                f'tiers: the path of "ssd" lies in memory: `{folder}` is on {kind}. Give a folder on a drive'
            )
        if kind.partition(".")[0] in _ON_NETWORK:
            log.warning(f"tier ssd: `{folder}` is on {kind}: all state goes through it each step; use a local drive")
    if options.budget_bytes is not None:
        return options.budget_bytes
    drives, free = Counter(map(drive_of, folders)), [os.statvfs(folder) for folder in folders]
    shares = [
        each.f_bavail * each.f_frsize // drives[drive_of(folder)] for folder, each in zip(folders, free, strict=True)
    ]
    return int(min(shares) * len(folders) * _USED)


def drive_of(folder: Path) -> int:
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
    drive = drive_of(folder)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        of_mount, _, of_filesystem = line.partition(" - ")
        if of_mount.split()[2] == f"{os.major(drive)}:{os.minor(drive)}":
            return of_filesystem.split()[0]
    return ""


__all__ = ["Node", "Tier", "TierKind", "Topology"]

_CXL = "cxl"
_ADDING = threading.Lock()


class TierKind(enum.Enum):
    """The kind of memory of a tier, fastest first."""

    GPU = "gpu"
    DRAM = "dram"
    CXL = "cxl"
    SSD = "ssd"


def _combined(ratings: Sequence[float | None], combine: Callable[[list[float]], float]) -> float | None:
    known = [rating for rating in ratings if rating is not None]
    return combine(known) if known and len(known) == len(ratings) else None


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
        return _combined([node.read_bytes_per_s for node in self.near_nodes], sum)

    @property
    def write_bytes_per_s(self) -> float | None:
        """Rated write bandwidth of the near nodes together; None when the firmware leaves out one of them."""
        return _combined([node.write_bytes_per_s for node in self.near_nodes], sum)

    @property
    def read_latency_ns(self) -> float | None:
        """Rated read latency of the slowest near node; None when the firmware leaves out one of them."""
        return _combined([node.read_latency_ns for node in self.near_nodes], max)

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
    name, with one warning, and from then on it is one of `tiers`.
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
        allowed = allowed_node_ids(root)
        found = [node for node in read_nodes(root) if node.capacity_bytes > 0]
        # the memory of a GPU may be a node, as on a GH200; torch allocates from it
        texts = [read_text(path) or "" for path in root.glob("proc/driver/nvidia/gpus/*/numa_status")]
        of_gpu = [re.search(r"^(?:NUMA )?Nodes?:\s*(\d[\d,-]*)", text, re.MULTILINE | re.IGNORECASE) for text in texts]
        of_gpus = {node_id for match in of_gpu if match is not None for node_id in parse_id_list(match[1])}
        found = [node for node in found if node.node_id not in of_gpus]
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

    def with_ssd(self, options: SsdOptions) -> "Topology":
        """Return this machine with the tier `ssd`; raises ConfigError where a path is no folder."""
        capacity = ssd_capacity_bytes(options)
        ssd = Tier(SSD, TierKind.SSD, (), folders=options.paths, file_bytes=capacity, versions=options.versions)
        return replace(self, ssd=ssd)

    @property
    def names(self) -> tuple[str, ...]:
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
        if name != _CXL or not self.backs_cxl:
            raise TierNotFoundError(f"there is no tier {name!r}; {self.what_there_is(name)}")
        backing = self.tiers[0]
        added = replace(backing, name=_CXL, kind=TierKind.CXL, emulated=True)
        with _ADDING:
            if _CXL in self.names:  # another thread was faster
                return added
            object.__setattr__(self, "tiers", (*self.tiers, added))
        warn(
            f"there is no CXL memory ({self._why_no_cxl()}): tier 'cxl' is backed by DRAM on node "
            f"{', '.join(map(str, backing.node_ids))}. Set on_missing_tier='error' to refuse instead.",
            MissingTierWarning,
        )
        return added

    def what_there_is(self, missing: str) -> str:
        """Return the end of a message about a tier that is missing: those that there are, and how to have this one."""
        text = f"this machine has: {', '.join(repr(tier.name) for tier in self._all_tiers())}"
        if missing == SSD:
            text += '. Name a folder for it: tiers={"ssd": {"path": "/nvme/run"}}'
        return text

    def node_tier(self, node_id: int) -> Tier | None:
        """Return the first tier that really has the node (an emulated one never does), None for an unknown node."""
        return next((tier for tier in self.tiers if not tier.emulated and node_id in tier.node_ids), None)

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
        return min(node_free_bytes(self.root, node_id, capacity), self.host_available_bytes())

    def host_limit_bytes(self) -> int:
        """Return the most host memory this process can ever use: physical memory or a control group's limit."""
        if self.root is None:
            return self._real_capacity_bytes()
        limits = [limit.limit_bytes for limit in cgroup_limits(self.root)]
        return min([read_meminfo(self.root / "proc/meminfo").get("MemTotal", 0), *limits])

    def host_available_bytes(self) -> int:
        """Return the host memory this process can take now: MemAvailable or what a control group leaves of it."""
        if self.root is None:
            return self._real_capacity_bytes()
        left = [max(0, limit.limit_bytes - limit.used_bytes) for limit in cgroup_limits(self.root)]
        return min([read_meminfo(self.root / "proc/meminfo").get("MemAvailable", 0), *left])

    def describe(self) -> str:
        """Return the tiers and notes, one line each."""
        return "\n".join([*(tier.describe() for tier in self._all_tiers()), *self.notes])

    def _all_tiers(self) -> tuple[Tier, ...]:
        return self.tiers if self.ssd is None else (*self.tiers, self.ssd)

    def _real_capacity_bytes(self) -> int:
        return sum(tier.capacity_bytes for tier in self.tiers if not tier.emulated)

    def _why_no_cxl(self) -> str:
        return "; ".join(self.notes) or "no memory-only NUMA node is online"


def _group(usable: Sequence[Node]) -> tuple[Tier, ...]:
    by_distance = sorted(usable, key=lambda node: (node.distance, node.node_id))
    dram = Tier("dram", TierKind.DRAM, tuple(node for node in by_distance if node.has_cpus))
    cxl = Tier(_CXL, TierKind.CXL, tuple(node for node in by_distance if not node.has_cpus))
    return tuple(tier for tier in (dram, cxl) if tier.nodes)
