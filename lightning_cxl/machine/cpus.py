"""CPUs of NUMA nodes: which ones this process may use, and which are nearest to a node's memory."""

import os
from pathlib import Path

from lightning_cxl.machine.nodes import parse_id_list, read_text

_NODES = "sys/devices/system/node"


def usable_cpus(root: Path = Path("/"), allowed: frozenset[int] | None = None) -> dict[int, tuple[int, ...]]:
    """Return the CPUs of every node that this process may run on; nodes without such CPUs are left out.

    Args:
        root: where ``sys`` is found.
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
