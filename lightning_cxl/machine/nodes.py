"""The machine's NUMA nodes, CPUs and memory limits, as the kernel describes them under ``/sys`` and ``/proc``."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
    """Return the ids of a kernel list such as ``"0-2,5"``; empty text gives ``()``."""
    ids: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            ids.extend(range(int(first), int(last or first) + 1))
    return tuple(ids)


def read_text(path: Path) -> str | None:
    """Return a file's text without surrounding white space, None when it is absent or may not be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def read_meminfo(path: Path) -> dict[str, int]:
    """Return a meminfo file (the machine's or one node's) in bytes by field name; empty when there is none."""
    fields: dict[str, int] = {}
    for line in (read_text(path) or "").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words:
            fields[name.split()[-1]] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return fields


def read_status(root: Path, field: str) -> str | None:
    """Return one field of ``/proc/self/status``, None when it is not there."""
    for line in (read_text(root / "proc/self/status") or "").splitlines():
        if line.startswith(field + ":"):
            return line.partition(":")[2].strip()
    return None


def allowed_node_ids(root: Path) -> frozenset[int] | None:
    """Return the nodes that this process's cpuset lets it allocate from, None when there is no restriction to read."""
    text = read_status(root, "Mems_allowed_list")
    return None if text is None else frozenset(parse_id_list(text))


def gpu_node_ids(root: Path) -> frozenset[int]:
    """Return the nodes that are the memory of a GPU, as on a GH200, where the GPU's own allocator uses them."""
    texts = [read_text(path) or "" for path in root.glob("proc/driver/nvidia/gpus/*/numa_status")]
    found = [re.search(r"^(?:NUMA )?Nodes?:\s*(\d[\d,-]*)", text, re.MULTILINE | re.IGNORECASE) for text in texts]
    return frozenset(node_id for match in found if match is not None for node_id in parse_id_list(match[1]))


def read_nodes(root: Path) -> tuple[Node, ...]:
    """Return every online node that has memory, by id. A kernel without NUMA shows as node 0 with CPUs."""
    node_ids = _memory_node_ids(root)
    base = root / _NODES
    if not node_ids:
        return (Node(0, True, read_meminfo(root / "proc/meminfo").get("MemTotal", 0)),)
    online = parse_id_list(read_text(base / "online") or "") or node_ids
    cpu_ids = frozenset(node_id for node_id in online if read_text(base / f"node{node_id}/cpulist"))
    normal = read_text(base / "has_normal_memory")
    normal_ids = node_ids if normal is None else parse_id_list(normal)
    return tuple(
        Node(
            node_id=node_id,
            has_cpus=node_id in cpu_ids,
            capacity_bytes=_capacity_bytes(root, node_id, node_ids),
            distance=_distance(base / f"node{node_id}/distance", online, cpu_ids),
            movable=node_id not in normal_ids,
            read_bytes_per_s=_rating(base / f"node{node_id}", "read_bandwidth", 1e6),
            write_bytes_per_s=_rating(base / f"node{node_id}", "write_bandwidth", 1e6),
            read_latency_ns=_rating(base / f"node{node_id}", "read_latency", 1.0),
            write_latency_ns=_rating(base / f"node{node_id}", "write_latency", 1.0),
        )
        for node_id in node_ids
    )


def node_free_bytes(root: Path, node_id: int, capacity_bytes: int) -> int:
    """Return what can still be taken from a node now, head-room for the kernel and others subtracted.

    That is free memory plus the file cache that the kernel gives up under pressure; on a machine with a single node
    the kernel's own estimate, MemAvailable.
    """
    headroom = min(max(capacity_bytes // 64, _HEADROOM_MIN_BYTES), _HEADROOM_MAX_BYTES)
    if len(_memory_node_ids(root)) > 1:
        fields = read_meminfo(root / _NODES / f"node{node_id}/meminfo")
        free = fields.get("MemFree", 0) + fields.get("Active(file)", 0) + fields.get("Inactive(file)", 0)
    else:
        free = read_meminfo(root / "proc/meminfo").get("MemAvailable", 0)
    return max(0, free - headroom)


def _memory_node_ids(root: Path) -> tuple[int, ...]:
    text = read_text(root / _NODES / "has_memory")
    return parse_id_list(text) if text else ()


def _capacity_bytes(root: Path, node_id: int, node_ids: tuple[int, ...]) -> int:
    # memory that a hypervisor plugged in late is in /proc/meminfo but not always in the node's own file
    path = root / "proc/meminfo" if len(node_ids) == 1 else root / _NODES / f"node{node_id}/meminfo"
    return read_meminfo(path).get("MemTotal", 0)


def _distance(path: Path, online: tuple[int, ...], cpu_ids: frozenset[int]) -> int:
    distances = [int(word) for word in (read_text(path) or "").split()]
    from_cpus = [distance for node_id, distance in zip(online, distances, strict=False) if node_id in cpu_ids]
    return min(from_cpus, default=10)


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
    """Return the CPUs of every node that this process may run on; nodes without such CPUs are left out.

    Args:
        allowed: the CPUs of this process; asked from the kernel when None.
    """
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    online = parse_id_list(read_text(root / _NODES / "online") or "")
    by_node = {node: parse_id_list(read_text(root / _NODES / f"node{node}/cpulist") or "") for node in online}
    usable = {node: tuple(cpu for cpu in cpus if cpu in allowed) for node, cpus in by_node.items()}
    return {node: cpus for node, cpus in usable.items() if cpus}


def nearest_cpu_nodes(root: Path, cpu_nodes: frozenset[int]) -> dict[int, int]:
    """Return, for every online node, the nearest of `cpu_nodes` by SLIT distance; the lowest id of equals."""
    online = parse_id_list(read_text(root / _NODES / "online") or "")
    nearest = {}
    for node in online:
        distances = [int(word) for word in (read_text(root / _NODES / f"node{node}/distance") or "").split()]
        candidates = [(d, other) for other, d in zip(online, distances, strict=False) if other in cpu_nodes]
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
    """Return the limits that hold for this process, innermost group first; groups without a limit are left out."""
    return tuple(limit for version, group in _groups(root) if (limit := _read_limit(version, group)) is not None)


def host_limit_bytes(root: Path) -> int:
    """Return the most host memory that this process can ever use: physical memory, or less by a control group."""
    return min([read_meminfo(root / "proc/meminfo").get("MemTotal", 0), *(c.limit_bytes for c in cgroup_limits(root))])


def host_available_bytes(root: Path) -> int:
    """Return the host memory that this process can still take now without being killed for it."""
    available = read_meminfo(root / "proc/meminfo").get("MemAvailable", 0)
    return min([available, *(max(0, c.limit_bytes - c.used_bytes) for c in cgroup_limits(root))])


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (cgroup version, folder) of this process's memory groups and of their ancestors.

    Inside a container the path named in /proc/self/cgroup may lie outside what is mounted: folders that do not exist
    are skipped, and the mount's top (then the container's own group) is always looked at.
    """
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            version, mount = 2, root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup/memory"
        else:
            continue
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for depth in range(len(parts), -1, -1):
            yield version, mount.joinpath(*parts[:depth])


def _read_limit(version: int, group: Path) -> MemoryLimit | None:
    limits = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    found = [int(text) for name in limits if (text := read_text(group / name)) and text.isdigit()]
    # v1 writes "no limit" as the largest multiple of the page size below 2^63
    found = [limit for limit in found if limit < 1 << 62]
    if not found:
        return None
    used = int(read_text(group / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or 0)
    prefix = "" if version == 2 else "total_"
    stat = dict(line.split() for line in (read_text(group / "memory.stat") or "").splitlines())
    droppable = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return MemoryLimit(group, min(found), max(0, used - droppable))
