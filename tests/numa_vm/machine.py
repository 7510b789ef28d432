"""The guest's NUMA nodes: how they are described, the kinds of machine that tests run on, and QEMU's arguments."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

_DRAM = "cpus=2,mem=3G,lat=110,bw=120G,dist=10"
_CARD = "mem=1G,lat=250,bw=28G,dist=24"


class VmError(Exception):
    """The virtual machine cannot be built, or did not start."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node of the guest. Speeds are what its firmware says of the way from the CPUs."""

    cpus: int = 0
    """0: a memory-only node, as CXL memory appears."""
    mem: int = 0
    """Bytes."""
    lat: int = 0
    """Nanoseconds; 0 leaves the speeds of the node out of HMAT."""
    bw: int = 0
    """Bytes per second."""
    dist: int = 20
    """SLIT distance from the CPUs' node."""
    hot: int = 0
    """1: a DIMM that the kernel adds late and puts into ZONE_MOVABLE, as CXL memory usually is. Only the last node may
    be one, because the firmware's tables name no node after it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A guest: its nodes, and whether the firmware has HMAT (speeds of nodes)."""

    nodes: tuple[NodeSpec, ...]
    hmat: bool = True


def parse_nodes(text: str) -> tuple[NodeSpec, ...]:
    """Return the nodes of e.g. ``"cpus=2,mem=3G;mem=1G,lat=250,bw=28G,dist=24"``, one clause per node.

    Raises:
        VmError: a setting that does not exist or is no number, or nodes that make no machine.
    """
    nodes = []
    for clause in text.split(";"):
        values: dict[str, int] = {}
        for item in clause.strip().split(","):
            key, _, value = item.partition("=")
            if key not in NodeSpec.__dataclass_fields__:
                known = ", ".join(NodeSpec.__dataclass_fields__)
                raise VmError(f"{item!r} of node {len(nodes)} is no setting; there are: {known}")
            values[key] = parse_size(value)
        nodes.append(NodeSpec(**values))
    if not nodes[0].cpus or not nodes[0].mem or any(node.cpus for node in nodes[1:]):
        raise VmError(f"the first node, and no other, must have CPUs; it must have memory, too: {text!r}")
    if any(node.hot for node in nodes[:-1]):
        raise VmError(f"only the last node can be hot-plugged: {text!r}")
    return tuple(nodes)


def parse_size(text: str) -> int:
    """Return a number such as ``"24"`` or ``"3G"`` (binary units).

    Raises:
        VmError: it is none.
    """
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not match:
        raise VmError(f"not a size: {text!r}; write e.g. 512M or 3G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


MACHINES = {
    "cxl2": Machine(parse_nodes(f"{_DRAM};{_CARD};{_CARD}")),
    "cxl1hot": Machine(parse_nodes(f"{_DRAM};{_CARD},hot=1")),
    "cxl1": Machine(parse_nodes(f"{_DRAM};{_CARD}")),
    "cxl1nohmat": Machine(parse_nodes(f"{_DRAM};{_CARD}"), hmat=False),
}
TESTED = ("cxl2", "cxl1hot")
"""Those that all tests run on: three nodes; and two, one of them movable. Every boot costs minutes of imports."""


def machine(text: str) -> Machine:
    """Return the machine of a name in `MACHINES`, or of a description that `parse_nodes` reads."""
    return MACHINES.get(text) or Machine(parse_nodes(text))


def numa_arguments(machine: Machine) -> list[str]:
    """Return QEMU's arguments for CPUs, memory, nodes, distances and speeds."""
    nodes = machine.nodes
    plugged = sum(node.mem for node in nodes if not node.hot) >> 20
    slots = f",slots={len(nodes)},maxmem=64G" if any(node.hot for node in nodes) else ""
    arguments = ["-machine", "q35,hmat=on" if machine.hmat else "q35"]
    arguments += ["-smp", str(nodes[0].cpus), "-m", f"{plugged}M{slots}"]
    for index, node in enumerate(nodes):
        text = f"node,nodeid={index}"
        text += f",cpus=0-{node.cpus - 1}" if node.cpus else ""
        text += "" if node.hot or not node.mem else f",memdev=m{index}"
        text += ",initiator=0" if machine.hmat else ""
        if node.mem:  # shared, because the file server of the host reads and writes it
            arguments += ["-object", f"memory-backend-memfd,id=m{index},size={node.mem},share=on"]
        arguments += ["-numa", text]
    arguments += _distances(nodes)
    arguments += _speeds(nodes) if machine.hmat else []
    for index, node in enumerate(nodes):
        if node.hot:
            arguments += ["-device", f"pc-dimm,id=dimm{index},memdev=m{index},node={index}"]
    return arguments


def _distances(nodes: Sequence[NodeSpec]) -> list[str]:
    arguments = []
    for a, b in combinations(range(len(nodes)), 2):
        # from card to card data goes through the CPUs
        distance = nodes[b].dist if a == 0 else max(nodes[a].dist, nodes[b].dist) + 4
        for source, target in ((a, b), (b, a)):
            arguments += ["-numa", f"dist,src={source},dst={target},val={distance}"]
    return arguments


def _speeds(nodes: Sequence[NodeSpec]) -> list[str]:
    arguments = []
    for index, node in enumerate(nodes):
        if node.lat and node.bw:
            head = f"hmat-lb,initiator=0,target={index},hierarchy=memory"
            arguments += ["-numa", f"{head},data-type=access-latency,latency={node.lat}"]
            arguments += ["-numa", f"{head},data-type=access-bandwidth,bandwidth={node.bw >> 20}M"]
    return arguments
