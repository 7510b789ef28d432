"""How much host memory this process may use: the machine's and its control groups' limits (cgroup v1 and v2)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lightning_cxl.machine.nodes import read_meminfo, read_text


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
