"""``python -m lightning_cxl env``: the machine as this package sees it, and what to change about it."""

import importlib.metadata
import json
import os
import platform
import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightning_cxl.commands import parsers
from lightning_cxl.devices import devices_apart
from lightning_cxl.machine.recorder import last
from lightning_cxl.machine.speeds import load_calibration, tier_speeds
from lightning_cxl.machine.topology import (
    TierKind,
    Topology,
    allowed_node_ids,
    cgroup_limits,
    node_free_bytes,
    read_nodes,
    read_text,
)
from lightning_cxl.native import _cpu
from lightning_cxl.text import format_bytes

_PACKAGES = ("lightning_cxl", "torch", "lightning", "transformers")
_TIER_FIELDS = ("name", "capacity_bytes", "emulated", "read_bytes_per_s", "write_bytes_per_s", "read_latency_ns")


def main(arguments: Sequence[str]) -> None:
    options = parsers.env().parse_args(arguments)
    if options.last:
        print(last())
        return
    report = environment_report()
    print(json.dumps(report, indent=1) if options.json else format_environment(report))


def environment_report(root: str | os.PathLike[str] = "/") -> dict[str, Any]:
    """Return what matters about this machine as a JSON-able dict; ``advice`` says what to change."""
    root = Path(root)
    topology, allowed = Topology.detect(root), allowed_node_ids(root)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    isa = isa_error = None
    try:
        isa = _cpu.best_isa()
    except ValueError as error:
        isa_error = str(error)
    buses = ((root / "sys/bus").glob(pattern) for pattern in ("cxl/devices/mem*", "dax/devices/dax*"))
    cards = sorted(path.name for bus in buses for path in bus)
    huge_pages = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    calibration = load_calibration(topology, [device.name for device in devices_apart()])
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    installed = {each.name.replace("-", "_"): each.version for each in importlib.metadata.distributions()}
    speeds = {tier.name: tier_speeds(tier, calibration) for tier in topology.tiers}  # those that plans use
    report: dict[str, Any] = {
        "tiers": [
            {
                **{name: getattr(tier, name) for name in _TIER_FIELDS},
                "node_ids": list(tier.node_ids),
                "kind": tier.kind.value,
                "description": tier.describe(),
            }
            for tier in topology.tiers
        ],
        "nodes": [
            {
                **{name: value for name, value in asdict(node).items() if name != "movable"},
                "free_bytes": node_free_bytes(root, node.node_id, node.capacity_bytes),
                "zone": "movable" if node.movable else "normal",
                "allowed": allowed is None or node.node_id in allowed,
            }
            for node in read_nodes(root)
        ],
        "notes": list(topology.notes),
        "offline_cards": [] if topology.select(kind=TierKind.CXL) else cards,
        "speeds": {name: {"source": each.origin, **each.values} for name, each in speeds.items()},
        "limits": {
            "memory_bytes": topology.host_limit_bytes(),
            "available_bytes": topology.host_available_bytes(),
            "cgroups": [{**asdict(limit), "path": str(limit.path)} for limit in cgroup_limits(root)],
            "memlock_bytes": None if memlock == resource.RLIM_INFINITY else memlock,
        },
        "kernel": {
            "release": platform.release(),
            "transparent_hugepage": huge_pages and huge_pages.partition("[")[2].partition("]")[0],  # always [never]
            "numa_balancing": read_text(root / "proc/sys/kernel/numa_balancing"),
        },
        "cpu": {
            "supported_isas": list(_cpu.supported_isas()),
            "threads": _cpu.available_threads(str(root)),
            "isa": isa,
            "isa_error": isa_error,
        },
        "accelerator": {
            "kind": None if device is None else device.type,
            "num_devices": 0 if device is None else torch.accelerator.device_count(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: installed.get(name) for name in _PACKAGES},
            "CUDA": torch.version.cuda,
        },
    }
    report["advice"] = advice(report)
    return report


def advice(report: Mapping[str, Any]) -> list[str]:
    found = []
    kernel, limits = report["kernel"], report["limits"]
    if report["cpu"]["isa_error"]:
        found.append(f"The chosen instruction set cannot be used: {report['cpu']['isa_error']}")
    for node in report["nodes"]:
        if not node["allowed"]:
            found.append(
                f"Node {node['node_id']} ({format_bytes(node['capacity_bytes'])}) is outside this process's cpuset: "
                f"widen `cpuset.mems` (`docker run --cpuset-mems`, systemd `AllowedMemoryNodes=`) to use it."
            )
        elif node["zone"] == "movable":
            found.append(
                f"Node {node['node_id']} is online as movable memory: page-locking for a GPU moves pages off it. Bring "
                f"it online as kernel memory: `daxctl offline-memory daxX.Y; daxctl online-memory --no-movable daxX.Y`."
            )
    if report["offline_cards"]:
        found.append(
            f"The memory of a CXL card is not used ({', '.join(report['offline_cards'])}): bring it online with "
            "`daxctl reconfigure-device --mode=system-ram --no-movable daxX.Y`, see `daxctl list`."
        )
    tiers = {tier["name"]: tier for tier in report["tiers"]}
    for name, speeds in report["speeds"].items():
        if speeds["source"] == "unknown" and tiers[name]["kind"] == "cxl":
            found.append(
                f"How fast tier `{name}` is, neither the firmware tells nor a measurement, so nothing can be planned "
                f"for it: measure with `python -m lightning_cxl calibrate`."
            )
    memlock = limits["memlock_bytes"]
    if memlock is not None and memlock < limits["memory_bytes"]:
        found.append(
            f"Locked memory is limited to {format_bytes(memlock)}: with a GPU, page-locking host memory may fail. "
            f"Raise it: `ulimit -l unlimited`, systemd `LimitMEMLOCK=infinity`, or `docker run --ulimit memlock=-1`."
        )
    if kernel["transparent_hugepage"] == "never":
        found.append(
            "Transparent huge pages are off, so large buffers cost more TLB misses: "
            "`echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`."
        )
    if len(report["nodes"]) > 1 and kernel["numa_balancing"] not in (None, "0"):
        found.append(
            "NUMA balancing is on: what this package places stays, but the kernel moves all other memory between nodes "
            "during a run. For steady timings: `sudo sysctl kernel.numa_balancing=0`."
        )
    return found


def format_environment(report: Mapping[str, Any]) -> str:
    """Return a report as text, each key a section; numbers in the units that their names end in."""
    lines = []
    for title, content in {**report, "advice": report["advice"] or ["nothing to change"]}.items():
        if isinstance(content, Mapping):
            rows = [f"{_label(key)}: {_shown(key, value)}" for key, value in content.items()]
        else:
            rows = [_shown("", each) for each in content]
        lines += [title, *(f"  {row}" for row in rows)] if rows else []
    return "\n".join(lines)


def _label(key: str) -> str:
    return key.removesuffix("_per_s").removesuffix("_bytes").removesuffix("_ns")


def _shown(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        row = ", ".join(f"{_label(name)} {_shown(name, each)}" for name, each in value.items() if each is not None)
        return value.get("description") or row
    if isinstance(value, list):
        return ", ".join(_shown("", each) for each in value) or "none"
    if value is None:
        return "none"
    if key.endswith("_bytes_per_s"):
        return f"{value / 1e9:.1f} GB/s"
    if key.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.0f} ns" if key.endswith("_ns") else str(value)
