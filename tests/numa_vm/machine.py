"""The guest's NUMA nodes: how they are described, the kinds of machine that tests run on, and QEMU's arguments."""

from dataclasses import dataclass, replace
from itertools import permutations, product

GIB = 1 << 30
_LOCAL = 10
_FURTHER = 4


class VmError(Exception):
    """The virtual machine cannot be built, or did not start."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node of the guest; those with CPUs come first. Speeds are what its firmware says of the way from the CPUs."""

    cpus: int = 0
    """0: a memory-only node, as CXL memory appears."""
    mem: int = 0
    """Bytes."""
    lat: int = 0
    """Nanoseconds."""
    bw: int = 0
    """Bytes per second."""
    dist: int = 20
    """SLIT distance from the node at whose socket it is; of a socket, from the others."""
    at: int = 0
    """The socket at which a memory-only node is: the id of a node with CPUs."""
    hot: int = 0
    """1: a DIMM that the kernel adds late and puts into ZONE_MOVABLE, as CXL memory usually is. Only the last node may
    be one, because the firmware's tables name no node after it."""


@dataclass(frozen=True, slots=True)
class Machine:
    nodes: tuple[NodeSpec, ...]

    @property
    def sockets(self) -> tuple[int, ...]:
        """Ids of the nodes with CPUs, each of which is a socket."""
        return tuple(index for index, node in enumerate(self.nodes) if node.cpus)

    def distance(self, source: int, target: int) -> int:
        """Return the SLIT distance between two nodes: data goes from a card to its socket, and from there on."""
        if source == target:
            return _LOCAL
        homes = [index if self.nodes[index].cpus else self.nodes[index].at for index in (source, target)]
        cards = [self.nodes[index].dist for index in (source, target) if not self.nodes[index].cpus]
        between = [max(self.nodes[home].dist for home in homes)] if homes[0] != homes[1] else []
        legs = cards + between
        return max(legs) + _FURTHER * (len(legs) - 1)


_DRAM = NodeSpec(cpus=2, mem=3 * GIB, lat=110, bw=120 * GIB, dist=10)
_CARD = NodeSpec(mem=GIB, lat=250, bw=28 * GIB, dist=24)
_SOCKET = replace(_DRAM, mem=3 * GIB // 2, dist=21)
_SMALL_CARD = replace(_CARD, mem=GIB // 2, dist=17)
MACHINES = {
    "cxl2": Machine((_DRAM, _CARD, _CARD)),
    "cxl1hot": Machine((_DRAM, replace(_CARD, hot=1))),
    "dual2": Machine((_SOCKET, _SOCKET, _SMALL_CARD, replace(_SMALL_CARD, at=1))),
}
"""Three nodes; two, one of them movable; and two sockets with a card each. Every boot costs minutes of imports."""


def numa_arguments(machine: Machine) -> list[str]:
    """Return QEMU's arguments for CPUs, memory, nodes, distances and speeds; on several sockets also PCI bridges."""
    nodes, sockets = machine.nodes, machine.sockets
    plugged = sum(node.mem for node in nodes if not node.hot) >> 20
    slots = f",slots={len(nodes)},maxmem=64G" if any(node.hot for node in nodes) else ""
    cpus = nodes[0].cpus * len(sockets)
    arguments = ["-machine", "q35,hmat=on", "-m", f"{plugged}M{slots}"]
    arguments += ["-smp", f"{cpus},sockets={len(sockets)},cores={nodes[0].cpus},threads=1"]
    for index, node in enumerate(nodes):
        text = f"node,nodeid={index}"
        text += f",cpus={index * node.cpus}-{(index + 1) * node.cpus - 1}" if node.cpus else ""
        text += "" if node.hot else f",memdev=m{index}"
        text += f",initiator={index if node.cpus else node.at}"
        # shared, because the file server of the host reads and writes it
        arguments += ["-object", f"memory-backend-memfd,id=m{index},size={node.mem},share=on", "-numa", text]
    for source, target in permutations(range(len(nodes)), 2):
        arguments += ["-numa", f"dist,src={source},dst={target},val={machine.distance(source, target)}"]
    arguments += _speeds(machine)
    for index, node in enumerate(nodes):
        if node.hot:
            arguments += ["-device", f"pc-dimm,id=dimm{index},memdev=m{index},node={index}"]
    return arguments + (_bridges(machine) if len(sockets) > 1 else [])


def _speeds(machine: Machine) -> list[str]:
    """Return the ratings of the way from every socket; from another socket than its own a node is slower."""
    arguments = []
    for socket, (index, node) in product(machine.sockets, enumerate(machine.nodes)):
        far = 2 if socket != (index if node.cpus else node.at) else 1
        head = f"hmat-lb,initiator={socket},target={index},hierarchy=memory"
        arguments += ["-numa", f"{head},data-type=access-latency,latency={node.lat * far}"]
        arguments += ["-numa", f"{head},data-type=access-bandwidth,bandwidth={(node.bw >> 20) // far}M"]
    return arguments


def _bridges(machine: Machine) -> list[str]:
    """Return a PCI root for each socket with one device, a port: its ``numa_node`` is what a GPU's there would be."""
    arguments = []
    for socket in machine.sockets:
        bus = f"pci{socket}"
        arguments += ["-device", f"pxb-pcie,id={bus},bus=pcie.0,bus_nr={64 * (socket + 1)},numa_node={socket}"]
        arguments += ["-device", f"pcie-root-port,id=port{socket},bus={bus},chassis={socket + 1}"]
    return arguments
