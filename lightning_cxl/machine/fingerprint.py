"""What tells one machine from another, so that measured speeds are used on the machine they come from."""

import hashlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_cxl.machine.cpus import usable_cpus
from lightning_cxl.machine.nodes import read_text
from lightning_cxl.machine.topology import Topology


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
        topology: of a real machine (`Topology.root` is not None).
        devices: names of the accelerators.
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
