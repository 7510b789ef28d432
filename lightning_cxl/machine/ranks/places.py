"""Which CPUs each process of this machine uses, and so which nodes are near to it: decided for all at once.

Every process decides for all of them from the same facts, so they agree without another word.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.ranks.host_cpus import HostCpus

_SHARES_CORES = ("auto", "exclusive")


class RankFacts(NamedTuple):
    """What one process knows, and the others of its machine do not."""

    device_node: int | None
    """The node at whose PCI bus its device is; None where it is the CPU, or the firmware does not say."""
    cpus: tuple[int, ...]
    """Those that it may use."""
    free_bytes: Mapping[int, int] | None = None
    """What every node has free; only local rank 0 looks, so that all divide the same."""
    available_bytes: int = 0
    """What all nodes have free together, by what limits these processes."""
    ssd_bytes: int = 0
    """What the tier `ssd` may hold; only that of local rank 0 counts, as above. 0 where there is none."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """What one process gets."""

    cpus: tuple[int, ...]
    node_ids: tuple[int, ...]
    """The nodes of these CPUs: the memory that is near."""
    num_sharers: int = 1
    """Processes that use the same CPUs, this one included."""
    is_bound: bool = True
    """False: it runs and allocates wherever it may."""
    notes: tuple[str, ...] = field(default=())


def decide_places(facts: Sequence[RankFacts], mode: str | Literal[False], host: HostCpus) -> list[RankPlace]:
    """Return what every process of this machine gets, by local rank.

    Args:
        facts: by local rank.
        mode: ``OffloadConfig.numa_binding``.
        host: the machine.

    Raises:
        ConfigError: ``"exclusive"`` with more processes on a node than cores.
    """
    usable = [frozenset(each.cpus) & host.all for each in facts]
    if not mode or (mode == "auto" and (len(facts) == 1 or len(host.sockets_of(host.all)) == 1)):
        return [_unbound(rank, usable, host) for rank in range(len(facts))]
    if _was_bound(usable, host):
        return [_kept(rank, facts, usable, host) for rank in range(len(facts))]
    homes = _homes(facts, usable[0], host)
    return [_bound(rank, homes, usable[0], mode, host) for rank in range(len(facts))]


def _was_bound(usable: Sequence[frozenset[int]], host: HostCpus) -> bool:
    """Return whether a launcher gave the processes CPUs of their own, or of some sockets only.

    A container that has some CPUs of every socket leaves a choice, and so does a machine that has one socket.
    """
    return len(set(usable)) > 1 or host.sockets_of(usable[0]) != host.sockets_of(host.all)


def _unbound(rank: int, usable: Sequence[frozenset[int]], host: HostCpus) -> RankPlace:
    cpus = tuple(sorted(usable[rank]))
    return RankPlace(cpus, host.nodes_of(cpus), _overlapping(rank, usable), is_bound=False)


def _kept(rank: int, facts: Sequence[RankFacts], usable: Sequence[frozenset[int]], host: HostCpus) -> RankPlace:
    cpus = tuple(sorted(usable[rank]))
    node_ids = host.nodes_of(cpus)
    notes = [
        f"CPUs {id_ranges(cpus)} were chosen before this process began (torchrun --numa-binding, numactl, SLURM or a "
        f"container): they stay, and memory is taken near them"
    ]
    if (device_node := facts[rank].device_node) is not None and device_node not in node_ids:
        notes.append(
            f"the device is at node {device_node}, and the CPUs are of node {', '.join(map(str, node_ids))}: copies to "
            f"it cross sockets. Let the launcher choose CPUs of node {device_node}, or none"
        )
    return RankPlace(cpus, node_ids, _overlapping(rank, usable), notes=tuple(notes))


def _overlapping(rank: int, usable: Sequence[frozenset[int]]) -> int:
    return sum(bool(usable[rank] & other) for other in usable)


def _homes(facts: Sequence[RankFacts], usable: frozenset[int], host: HostCpus) -> list[int]:
    """Return a node with CPUs for every process: its device's, else the nodes in turn, as many processes on each."""
    nodes = host.nodes_of(usable)
    homes = []
    for rank, each in enumerate(facts):
        if each.device_node is None:
            homes.append(nodes[rank * len(nodes) // len(facts)])
        else:
            homes.append(host.nearest(each.device_node, nodes))
    return homes


def _bound(rank: int, homes: Sequence[int], usable: frozenset[int], mode: str, host: HostCpus) -> RankPlace:
    own = homes[rank]
    wide = mode in ("auto", "socket")
    domain = [
        node for node in host.nodes_of(usable) if node == own or (wide and host.sockets[node] == host.sockets[own])
    ]
    sharers = sorted((home, other) for other, home in enumerate(homes) if home in domain)
    index = sharers.index((own, rank))
    if mode == "core-complex":
        groups = host.complexes_of(own, usable)
        turn = index % len(groups)
        return RankPlace(groups[turn], (own,), len(range(turn, len(sharers), len(groups))))
    cores = host.cores_of(domain, usable)
    if mode == "exclusive" and len(cores) < len(sharers):
        raise ConfigError(
            f'numa_binding="exclusive" needs a core for every process: node {own} has {len(cores)} cores that may be '
            f'used, and {len(sharers)} processes. Use "node" or "socket", or start fewer processes on this machine'
        )
    num_sharers = len(sharers)
    if mode in _SHARES_CORES and len(cores) >= len(sharers):
        cores = _part(cores, index, len(sharers))
        num_sharers = 1
    cpus = tuple(sorted(cpu for core in cores for cpu in core))
    return RankPlace(cpus, host.nodes_of(cpus), num_sharers)


def _part(cores: Sequence[tuple[int, ...]], index: int, count: int) -> list[tuple[int, ...]]:
    """Return one of `count` parts; where they cannot be equal, the first ones have a core more."""
    size, more = divmod(len(cores), count)
    begin = index * size + min(index, more)
    return list(cores[begin : begin + size + (index < more)])


def id_ranges(ids: Sequence[int]) -> str:
    """Return ids in the form of the kernel, such as ``"0-3,8"``."""
    ranges: list[list[int]] = []
    for each in sorted(ids):
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1][1] = each
        else:
            ranges.append([each, each])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
