"""Writes the files with which a kernel describes sockets, cores, nodes and PCI devices."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_cxl.machine.binding import id_ranges

GIB = 1 << 30
TWO_CARDS = ("10 21 17 25", "21 10 25 17", "17 25 10 29", "25 17 29 10")
"""Distances of two sockets, nodes 0 and 1, with a card at each, nodes 2 and 3."""


def write_machine(
    root: Path,
    nodes: Sequence[Sequence[int]],
    distances: Sequence[str],
    *,
    sockets: Mapping[int, int] | None = None,
    siblings: Sequence[Sequence[int]] = (),
    devices: Mapping[str, int] | None = None,
    gib: int = 4,
) -> Path:
    """Describe a machine under `root`, and return that.

    Args:
        root: an empty folder.
        nodes: the CPUs of every node; none for a card.
        distances: the row of every node.
        sockets: of every node with CPUs; each its own when None.
        siblings: CPUs that are hardware threads of one core; those that are not named have a core of their own.
        devices: node by PCI address.
        gib: memory of every node, all free.
    """
    text: dict[str, str] = {"sys/devices/system/cpu/online": id_ranges([cpu for cpus in nodes for cpu in cpus])}
    every = id_ranges(range(len(nodes)))
    for name in ("online", "has_memory", "has_normal_memory"):
        text[f"sys/devices/system/node/{name}"] = every
    kib = gib << 20
    for node, cpus in enumerate(nodes):
        base = f"sys/devices/system/node/node{node}"
        text[f"{base}/cpulist"] = id_ranges(cpus)
        text[f"{base}/distance"] = distances[node]
        text[f"{base}/meminfo"] = f"Node {node} MemTotal: {kib} kB\nNode {node} MemFree: {kib} kB"
        for cpu in cpus:
            core = next((each for each in siblings if cpu in each), [cpu])
            base = f"sys/devices/system/cpu/cpu{cpu}/topology"
            text[f"{base}/physical_package_id"] = str(node if sockets is None else sockets[node])
            text[f"{base}/thread_siblings_list"] = id_ranges(core)
    for address, node in (devices or {}).items():
        text[f"sys/bus/pci/devices/{address}/numa_node"] = str(node)
    total = kib * len(nodes)
    text["proc/meminfo"] = f"MemTotal: {total} kB\nMemFree: {total} kB\nMemAvailable: {total} kB"
    text["proc/self/status"] = f"Name:\tpython\nMems_allowed_list:\t{every}"
    for path, content in text.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content + "\n")
    return root
