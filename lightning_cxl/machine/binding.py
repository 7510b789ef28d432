"""`bind_rank`: gives one of several processes of this machine its CPUs, its near memory and its share of all tiers.

[Note: Binding of ranks]
Each process of a machine calls `bind_rank` once, early, and before it allocates what is placed. They tell each other
what only they know (`RankFacts`): the node of their device, the CPUs they may use, and local rank 0 what is free, so
that free memory is measured once. From these facts each decides for all alike (`decide_places`), and takes its part:

1. CPUs. All threads that are there move to them, and threads and children made later inherit them. A process that its
   launcher has bound (``torchrun --numa-binding``, numactl, SLURM) keeps its own.
2. Threads. As many as CPUs, divided by the processes that use the same ones. torchrun sets ``OMP_NUM_THREADS=1`` where
   nobody has; one thread would leave most CPUs idle while the optimizer steps, so that 1 does not count.
3. Memory. In the view of the process each tier fills its nearest nodes first (`seen_from`).
4. Budgets. Each gets its share of every tier (`share_budgets`), and of the tier `ssd` folders of its own (`share_ssd`).
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from lightning_cxl.config import OffloadConfig
from lightning_cxl.devices.device_type import device_type_of
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.disk_space import ssd_capacity_bytes
from lightning_cxl.machine.nodes import Node, parse_id_list, read_text
from lightning_cxl.machine.topology import Tier, Topology
from lightning_cxl.native import _cpu
from lightning_cxl.ssd_options import SSD, SsdOptions
from lightning_cxl.units import format_bytes

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


_SHARES_CORES = ("auto", "exclusive")


class RankFacts(NamedTuple):
    """Facts that one process tells the others of its machine."""

    device_node: int | None
    """The node at whose PCI bus its device is; None where it is the CPU, or the firmware does not say."""
    cpus: tuple[int, ...]
    """Those that it may use."""
    free_bytes: Mapping[int, int] | None = None
    """Free bytes of every node; only local rank 0 measures, so that all divide the same."""
    available_bytes: int = 0
    """Free bytes of all nodes together, within the limits of these processes."""
    ssd_bytes: int = 0
    """Capacity of the tier `ssd`; only that of local rank 0 counts, as above. 0 where there is none."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """CPUs and near nodes of one process."""

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

    Every process decides for all of them from the same facts, so they agree without another word.
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


_FAIR = 0.9
"""Shards are of equal size, so the process with the least room decides what fits: who is near to a card gets
more of it only within this part of an even share."""


def share_budgets(
    topology: Topology,
    budgets: Mapping[str, int],
    free_bytes: Mapping[int, int],
    available_bytes: int,
    near: Sequence[Sequence[int]],
    host: HostCpus,
) -> list[dict[str, int]]:
    """Return the budget of every tier of memory for every process, by local rank.

    A node is shared by the processes that it is nearest to. Where that would leave one with much less than an even
    share (a card at one of two sockets), the tier is shared evenly.

    Args:
        budgets: those of the user, for all processes together; a tier without one is limited by its free memory.
        available_bytes: of all nodes together: control groups may allow less than what is free.
    """
    shares: list[dict[str, int]] = [{} for _ in near]
    free = {tier.name: sum(free_bytes[node] for node in tier.node_ids) for tier in topology.tiers}
    together = sum(free_bytes.values())
    fraction = min(1.0, available_bytes / together) if together else 0.0
    for tier in topology.tiers:
        room = int(free[tier.name] * fraction)
        limit = min(room, budgets.get(tier.name, room))
        for share, part in zip(shares, _parts(tier, free_bytes, near, host), strict=True):
            share[tier.name] = int(limit * part)
    return shares


def _parts(tier: Tier, free_bytes: Mapping[int, int], near: Sequence[Sequence[int]], host: HostCpus) -> list[float]:
    """Return the fraction of a tier for every process."""
    rooms = [0.0] * len(near)
    for node in tier.node_ids:
        distances = [min(host.distance(own, node) for own in nodes) for nodes in near]
        closest = [rank for rank, distance in enumerate(distances) if distance == min(distances)]
        for rank in closest:
            rooms[rank] += free_bytes[node] / len(closest)
    even = sum(rooms) / len(near)
    if min(rooms) < _FAIR * even or not even:
        return [1 / len(near)] * len(near)
    return [room / sum(rooms) for room in rooms]


def seen_from(topology: Topology, near: Sequence[int], host: HostCpus, cpus: Sequence[int]) -> Topology:
    """Return the same tiers, each of which fills the nodes that are nearest to a process first.

    So `dram` is the memory of its socket until that is full, and `cxl` the card of its socket.
    """
    tiers = tuple(_seen(tier, near, host) for tier in topology.tiers)
    return replace(topology, tiers=tiers, measured_on=frozenset(cpus))


def _seen(tier: Tier, near: Sequence[int], host: HostCpus) -> Tier:
    nodes = sorted((_at_distance(node, near, host) for node in tier.nodes), key=lambda n: (n.distance, n.node_id))
    several = len({node.distance for node in nodes}) > 1
    return replace(tier, nodes=tuple(nodes), nearest_first=several)


def _at_distance(node: Node, near: Sequence[int], host: HostCpus) -> Node:
    if node.node_id in near:
        return replace(node, distance=LOCAL)
    return replace(node, distance=min(host.distance(own, node.node_id) for own in near))


def share_ssd(options: SsdOptions, rank: int, num_local_ranks: int, capacity_bytes: int) -> SsdOptions:
    """Return the options of the tier `ssd` for one of several processes.

    Their folders lie below those of the user, so that no two processes open one file, also where several machines see
    the same folder.

    Args:
        capacity_bytes: what they may store together, measured once for all of them.
    """
    paths = tuple(path / f"rank-{rank}" for path in options.paths)
    share = capacity_bytes // num_local_ranks
    return replace(options, paths=paths, budget_bytes=share, is_part=True)


Gather = Callable[[RankFacts], Sequence[RankFacts]]
"""Returns what all processes of this machine gave, by local rank."""
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class RankBinding:
    """The share of one process in its machine."""

    local_rank: int
    num_local_ranks: int
    mode: str | Literal[False]
    """``OffloadConfig.numa_binding``."""
    device_node: int | None
    """The node at whose PCI bus the device is; None where it is the CPU, or the firmware does not say."""
    place: RankPlace
    num_threads: int | None
    """Of torch and of our kernels; None where they were left as they are."""
    topology: Topology
    """The machine as this process sees it."""
    budgets: dict[str, int]
    """Bytes that it may take of every tier with a budget."""
    room: dict[str, int]
    """Bytes that it may take of the others; empty where no other process shares the machine."""
    ssd: SsdOptions | None
    """Its folders and its share of the tier `ssd`; None where there is none."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Unexpected findings, one sentence each."""
        return self.place.notes

    def describe(self) -> list[str]:
        """Return lines for a report: CPUs and threads, nodes, share of every tier, and what is unusual."""
        who = f"local rank {self.local_rank} of {self.num_local_ranks}"
        lines = []
        if self.place.is_bound:
            where = "" if self.device_node is None else f", device at node {self.device_node}"
            nodes = ", ".join(map(str, self.place.node_ids))
            lines.append(f"{who}: CPUs {id_ranges(self.place.cpus)} of node {nodes}{where} ({self.mode})")
            lines += [f"{who} sees {tier.describe()}" for tier in self.topology.tiers]
        if self.num_threads is not None:
            lines.append(f"{who}: {self.num_threads} thread{'s' if self.num_threads > 1 else ''}")
        if self.num_local_ranks > 1:
            parts = {**self.room, **self.budgets}
            shares = ", ".join(
                f"{format_bytes(parts[name])} of {name}" for name in self.topology.names if name in parts
            )
            lines.append(f"{who} may take {shares}: the memory of this machine is divided")
            if self.ssd is not None and self.ssd.budget_bytes is not None:
                folders = ", ".join(map(str, self.ssd.paths))
                lines.append(f"{who} may take {format_bytes(self.ssd.budget_bytes)} of {SSD}, in {folders}")
        return [*lines, *self.notes]


def bind_rank(
    local_rank: int,
    num_local_ranks: int,
    device: torch.device,
    config: OffloadConfig,
    topology: Topology,
    *,
    gather: Gather | None = None,
    rank: int | None = None,
) -> RankBinding:
    """Bind this process to its part of the machine, and return what it got. See [Note: Binding of ranks].

    Args:
        gather: how the processes of this machine tell each other something; needed where there are several.
        rank: of this process, among those of all machines; None where there is one machine.

    Returns:
        The share of this process; `Host` takes it.
    """
    root = topology.root or Path("/")
    for name in config.budgets():
        topology.tier(name)
    own = _facts(local_rank, num_local_ranks, device, topology, root)
    if (options := config.ssd()) is not None and local_rank == 0:
        own = own._replace(ssd_bytes=ssd_capacity_bytes(options))
    facts = _exchange(own, num_local_ranks, gather)
    host = read_host_cpus(root, own.cpus)
    places = decide_places(facts, config.numa_binding, host)
    place, seen, budgets, room = places[local_rank], topology, config.budgets(), dict[str, int]()
    if place.is_bound:
        seen = seen_from(topology, place.node_ids, host, own.cpus)
    if num_local_ranks > 1:
        first = facts[0]
        assert first.free_bytes is not None, "local rank 0 measures"
        near = [each.node_ids for each in places]
        shares = share_budgets(topology, budgets, first.free_bytes, first.available_bytes, near, host)[local_rank]
        room = {name: nbytes for name, nbytes in shares.items() if name not in budgets}
        budgets = {name: shares[name] for name in budgets}
    ssd = options
    if options is not None and (num_local_ranks > 1 or rank is not None):
        ssd = share_ssd(options, local_rank if rank is None else rank, num_local_ranks, facts[0].ssd_bytes)
    threads = None
    if config.numa_binding and (place.is_bound or num_local_ranks > 1):
        threads = _num_threads(place, len(own.cpus), num_local_ranks)
        os.environ[_THREADS] = str(threads)
        torch.set_num_threads(threads)
    if place.is_bound:
        move_threads(place.cpus)
    return RankBinding(
        local_rank, num_local_ranks, config.numa_binding, own.device_node, place, threads, seen, budgets, room, ssd
    )


def device_node(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return the node at whose PCI bus a device is; None for the CPU, and where the firmware does not say (-1)."""
    if device.type == "cpu":
        return None
    address = device_type_of(device).pci_address(device.index or 0)
    text = None if address is None else read_text(root / f"sys/bus/pci/devices/{address}/numa_node")
    return int(text) if text and int(text) >= 0 else None


def move_threads(cpus: Sequence[int]) -> None:
    """Let all threads of this process run on these CPUs only, but for those that were put on others on purpose."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            if os.sched_getaffinity(int(thread)) == before:
                os.sched_setaffinity(int(thread), cpus)


def _facts(local_rank: int, num_local_ranks: int, device: torch.device, topology: Topology, root: Path) -> RankFacts:
    free, available = None, 0
    if local_rank == 0 and num_local_ranks > 1:
        nodes = sorted({node for tier in topology.tiers for node in tier.node_ids})
        free = {node: topology.node_free_bytes(node) for node in nodes}
        available = topology.host_available_bytes()
    return RankFacts(device_node(device, root), tuple(sorted(os.sched_getaffinity(0))), free, available)


def _exchange(own: RankFacts, num_local_ranks: int, gather: Gather | None) -> Sequence[RankFacts]:
    if gather is None and num_local_ranks == 1:
        return [own]
    if gather is None:  # else also one process on its own takes part: those of all machines ask together
        raise ConfigError(
            f"{num_local_ranks} processes share this machine, and there is no way to tell each other what they use: "
            "give `gather`, such as one with torch.distributed.all_gather_object over the processes of this machine"
        )
    facts = gather(own)
    if len(facts) != num_local_ranks:
        raise ConfigError(
            f"`gather` returned {len(facts)} answers, and this machine has {num_local_ranks} processes: give one that "
            "asks the processes of this machine and no others"
        )
    return facts


def _num_threads(place: RankPlace, num_cpus: int, num_local_ranks: int) -> int:
    """Return the threads of this process: its part of the CPUs, within its control group's quota and OMP's limit."""
    given = os.environ.pop(_THREADS, "").split(",")[0].strip()
    allowed = _cpu.available_threads()  # without the variable: what the CPUs and the quota allow
    limits = [len(place.cpus) // place.num_sharers]
    if allowed < num_cpus:
        limits.append(allowed // num_local_ranks)
    if given.isdigit() and not (given == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        limits.append(int(given))
    return max(1, min(limits))
