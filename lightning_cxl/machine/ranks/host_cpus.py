"""`HostCpus`: the CPUs of this machine by node, socket and core, and how far nodes are from each other."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_cxl.machine.nodes import parse_id_list, read_text

_NODES = "sys/devices/system/node"
_CPUS = "sys/devices/system/cpu"
LOCAL, REMOTE = 10, 20
"""The kernel's distances where the firmware gives none: of a node from itself, and from any other."""


@dataclass(frozen=True, slots=True)
class HostCpus:
    """All CPUs that are online, whether this process may use them or not."""

    nodes: Mapping[int, tuple[int, ...]]
    """The CPUs of every node that has some."""
    sockets: Mapping[int, int]
    """The socket of every such node."""
    cores: Mapping[int, int]
    """The core of every CPU, named by its first hardware thread."""
    complexes: Mapping[int, tuple[int, ...]]
    """For every CPU those that share its last-level cache, itself alone where the kernel names none."""
    distances: Mapping[int, Mapping[int, int]]
    """From every online node to every other, as the firmware says."""

    @property
    def all(self) -> frozenset[int]:
        """All CPUs."""
        return frozenset(cpu for cpus in self.nodes.values() for cpu in cpus)

    def nodes_of(self, cpus: Iterable[int]) -> tuple[int, ...]:
        """Return the nodes that have some of these CPUs, socket after socket."""
        wanted = frozenset(cpus)
        found = [node for node, own in self.nodes.items() if wanted.intersection(own)]
        return tuple(sorted(found, key=lambda node: (self.sockets[node], node)))

    def sockets_of(self, cpus: Iterable[int]) -> frozenset[int]:
        """Return the sockets that have some of these CPUs."""
        return frozenset(self.sockets[node] for node in self.nodes_of(cpus))

    def cores_of(self, nodes: Sequence[int], allowed: frozenset[int]) -> list[tuple[int, ...]]:
        """Return the allowed CPUs of nodes, core by core, so that hardware threads of one core stay together."""
        found = []
        for node in nodes:
            by_core: dict[int, list[int]] = {}
            for cpu in self.nodes[node]:
                if cpu in allowed:
                    by_core.setdefault(self.cores[cpu], []).append(cpu)
            found += [tuple(by_core[core]) for core in sorted(by_core)]
        return found

    def complexes_of(self, node: int, allowed: frozenset[int]) -> list[tuple[int, ...]]:
        """Return the allowed CPUs of a node, together where they share a last-level cache; the largest groups first."""
        usable = [cpu for cpu in self.nodes[node] if cpu in allowed]
        found = {tuple(other for other in usable if other in self.complexes[cpu]) for cpu in usable}
        return sorted(found, key=lambda group: (-len(group), group))

    def distance(self, source: int, target: int) -> int:
        """Return how far a node is from another, by the kernel's own numbers where the firmware gives none."""
        known = self.distances.get(source, {}).get(target)
        return known if known is not None else LOCAL if source == target else REMOTE

    def nearest(self, node: int, candidates: Iterable[int]) -> int:
        """Return the candidate that is nearest to a node; the lowest id of equals."""
        return min(candidates, key=lambda other: (self.distance(node, other), other))


def read_host_cpus(root: Path, allowed: Sequence[int]) -> HostCpus:
    """Return the CPUs of a machine. A kernel without NUMA shows as node 0; without files, with the `allowed` CPUs."""
    online = parse_id_list(read_text(root / _CPUS / "online") or "")
    node_ids = parse_id_list(read_text(root / _NODES / "online") or "")
    nodes = {node: parse_id_list(read_text(root / _NODES / f"node{node}/cpulist") or "") for node in node_ids}
    if not any(nodes.values()):
        nodes = {0: online or tuple(allowed)}
    if online:
        nodes = {node: tuple(cpu for cpu in cpus if cpu in online) for node, cpus in nodes.items()}
    nodes = {node: cpus for node, cpus in nodes.items() if cpus}
    return HostCpus(
        nodes=nodes,
        sockets={node: _socket(root, node, cpus) for node, cpus in nodes.items()},
        cores={cpu: _core(root, cpu) for cpus in nodes.values() for cpu in cpus},
        complexes={cpu: _complex(root, cpu) for cpus in nodes.values() for cpu in cpus},
        distances={node: _distances(root, node, node_ids) for node in node_ids},
    )


def _socket(root: Path, node: int, cpus: Sequence[int]) -> int:
    # a firmware that does not say it writes -1; then every node is taken for a socket
    text = read_text(root / _CPUS / f"cpu{cpus[0]}/topology/physical_package_id")
    return int(text) if text and int(text) >= 0 else node


def _core(root: Path, cpu: int) -> int:
    siblings = parse_id_list(read_text(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list") or "")
    return min(siblings, default=cpu)


def _complex(root: Path, cpu: int) -> tuple[int, ...]:
    found: tuple[int, tuple[int, ...]] = (0, (cpu,))
    for cache in (root / _CPUS / f"cpu{cpu}/cache").glob("index*"):
        level, sharers = read_text(cache / "level"), read_text(cache / "shared_cpu_list")
        if level and sharers and read_text(cache / "type") in ("Unified", "Data"):
            found = max(found, (int(level), parse_id_list(sharers)))
    return found[1]


def _distances(root: Path, node: int, node_ids: Sequence[int]) -> dict[int, int]:
    words = (read_text(root / _NODES / f"node{node}/distance") or "").split()
    return {other: int(word) for other, word in zip(node_ids, words, strict=False)}
