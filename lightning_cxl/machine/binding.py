"""`bind_rank`: gives one of several processes of this machine its CPUs, its near memory and its share of all tiers.

[Note: Binding of ranks]
Each process of a machine calls `bind_rank` once, early, and before it allocates what is placed. They tell each other
what only they know (`RankFacts`): the node of their device, the CPUs they may use, and local rank 0 what is free, so
that free memory is measured once. From these facts each decides for all alike (`decide_places`), and takes its part:

1. CPUs. With ``"auto"`` a process gets its share of the cores of the socket of its device, and one that its launcher
   has bound (``torchrun --numa-binding``, numactl, SLURM) keeps its own. The other modes are torch's, for GPUs: torch
   binds before the processes tell each other their CPUs. All threads that are there move, and threads and children made
   later inherit the CPUs.
2. Threads. As many as CPUs, divided by the processes that use the same ones. torchrun sets ``OMP_NUM_THREADS=1`` where
   nobody has; one thread would leave most CPUs idle while the optimizer steps, so that 1 does not count.
3. Memory. In the view of the process each tier fills its nearest nodes first (`seen_from`).
4. Budgets. Each gets an equal share of every tier, for shards are of equal size, and of the tier `ssd` folders of its
   own: no two processes open one file, also where several machines see the same folder.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch.numa.binding import AffinityMode, NumaOptions

from lightning_cxl.config import SSD, OffloadConfig, SsdOptions
from lightning_cxl.devices import device_type_of
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.topology import (
    Tier,
    Topology,
    node_cpus,
    node_distances,
    online_node_ids,
    read_ids,
    read_text,
    ssd_capacity_bytes,
)
from lightning_cxl.native import _cpu
from lightning_cxl.text import format_bytes
from lightning_cxl.torch_private import find

_CPUS = "sys/devices/system/cpu"
_THREADS = "OMP_NUM_THREADS"
LOCAL, REMOTE = 10, 20
"""The kernel's distances where the firmware gives none: of a node from itself, and from any other."""


@dataclass(frozen=True, slots=True)
class HostCpus:
    """All CPUs that are online, whether this process may use them or not."""

    nodes: Mapping[int, tuple[int, ...]]  # the CPUs of every node that has some
    sockets: Mapping[int, int]  # the socket of every such node
    cores: Mapping[int, int]  # the core of every CPU, named by its first hardware thread
    distances: Mapping[int, Mapping[int, int]]  # from every online node to every other, as the firmware says

    @property
    def all(self) -> frozenset[int]:
        return frozenset(cpu for cpus in self.nodes.values() for cpu in cpus)

    def nodes_of(self, cpus: Iterable[int]) -> tuple[int, ...]:
        wanted = frozenset(cpus)
        found = [node for node, own in self.nodes.items() if wanted.intersection(own)]
        return tuple(sorted(found, key=lambda node: (self.sockets[node], node)))

    def sockets_of(self, cpus: Iterable[int]) -> frozenset[int]:
        return frozenset(self.sockets[node] for node in self.nodes_of(cpus))

    def distance(self, source: int, target: int) -> int:
        known = self.distances.get(source, {}).get(target)
        return known if known is not None else LOCAL if source == target else REMOTE


def read_host_cpus(root: Path, allowed: Sequence[int]) -> HostCpus:
    """Return the CPUs of a machine. A kernel without NUMA shows as node 0; without files, with the `allowed` CPUs."""
    online = read_ids(root / _CPUS / "online")
    node_ids = online_node_ids(root)
    nodes = node_cpus(root, node_ids)
    if not any(nodes.values()):
        nodes = {0: online or tuple(allowed)}
    if online:
        nodes = {node: tuple(cpu for cpu in cpus if cpu in online) for node, cpus in nodes.items()}
    nodes = {node: cpus for node, cpus in nodes.items() if cpus}
    sockets, cores = {}, {}
    for node, cpus in nodes.items():
        # a firmware that does not say it writes -1; then every node is taken for a socket
        text = read_text(root / _CPUS / f"cpu{cpus[0]}/topology/physical_package_id")
        sockets[node] = int(text) if text and int(text) >= 0 else node
        for cpu in cpus:
            siblings = read_ids(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list")
            cores[cpu] = min(siblings, default=cpu)
    return HostCpus(nodes=nodes, sockets=sockets, cores=cores, distances=node_distances(root, node_ids))


class RankFacts(NamedTuple):
    device_node: int | None
    """The node at whose PCI bus its device is; None where it is the CPU, or the firmware does not say."""
    cpus: tuple[int, ...]  # those that it may use
    room: Mapping[str, int] = {}
    """Bytes of every tier that all processes may take together; only local rank 0 measures, so all divide the same."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    cpus: tuple[int, ...]
    node_ids: tuple[int, ...]  # the nodes of these CPUs: the memory that is near
    num_sharers: int = 1  # processes that use the same CPUs, this one included
    is_bound: bool = True  # False: it runs and allocates wherever it may
    notes: tuple[str, ...] = ()  # unexpected findings, one sentence each


def decide_places(facts: Sequence[RankFacts], mode: str | Literal[False], host: HostCpus) -> list[RankPlace]:
    """Return what every process of this machine gets, by local rank: each decides for all, from the same facts."""
    usable = [frozenset(each.cpus) & host.all for each in facts]
    stays = len(facts) == 1 or len(host.sockets_of(host.all)) == 1
    # a container that has some CPUs of every socket leaves a choice
    is_chosen = len(set(usable)) > 1 or host.sockets_of(usable[0]) != host.sockets_of(host.all)
    if mode == "auto" and not stays and not is_chosen:
        return _parts_of_sockets([each.device_node for each in facts], usable[0], host)
    is_bound = bool(mode) and not (mode == "auto" and stays)
    places = []
    for own, cpus in zip(facts, usable, strict=True):
        num_sharers = sum(bool(cpus & other) for other in usable)
        node_ids, notes = host.nodes_of(cpus), list[str]()
        if is_bound and mode == "auto":
            notes.append(
                f"CPUs {id_ranges(sorted(cpus))} were chosen before this process began (torchrun --numa-binding, "
                f"numactl, SLURM or a container): they stay, and memory is taken near them"
            )
            if own.device_node is not None and own.device_node not in node_ids:
                notes.append(
                    f"the device is at node {own.device_node}, and the CPUs are of node "
                    f"{', '.join(map(str, node_ids))}: copies to it cross sockets. Let the launcher choose CPUs of "
                    f"node {own.device_node}, or none"
                )
        places.append(RankPlace(tuple(sorted(cpus)), node_ids, num_sharers, is_bound, tuple(notes)))
    return places


def _parts_of_sockets(device_nodes: Sequence[int | None], usable: frozenset[int], host: HostCpus) -> list[RankPlace]:
    nodes = host.nodes_of(usable)
    near = [  # of each process a node with CPUs: the nearest to its device, else the nodes in turn
        nodes[rank * len(nodes) // len(device_nodes)]
        if device is None
        else min(nodes, key=lambda node: (host.distance(device, node), node))
        for rank, device in enumerate(device_nodes)
    ]
    places: dict[int, RankPlace] = {}
    for socket in {host.sockets[node] for node in near}:
        own = [node for node in nodes if host.sockets[node] == socket]
        cpus = {cpu: (node, host.cores[cpu]) for node in own for cpu in host.nodes[node] if cpu in usable}
        cores = sorted(set(cpus.values()))  # hardware threads of one core stay together
        ranks = sorted((node, rank) for rank, node in enumerate(near) if node in own)
        size, more = divmod(len(cores), len(ranks))
        for index, (_, rank) in enumerate(ranks):
            begin = index * size + min(index, more)  # the first ones have a core more
            part = cores[begin : begin + size + (index < more)] if size else cores
            chosen = tuple(sorted(cpu for cpu in cpus if cpus[cpu] in part))
            places[rank] = RankPlace(chosen, host.nodes_of(chosen), 1 if size else len(ranks))
    return [places[rank] for rank in range(len(near))]


def id_ranges(ids: Sequence[int]) -> str:
    """Return ids in the form of the kernel, such as ``"0-3,8"``."""
    ranges: list[list[int]] = []
    for each in sorted(ids):
        if ranges and ranges[-1][1] == each - 1:
            ranges[-1][1] = each
        else:
            ranges.append([each, each])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def measure_room(topology: Topology, config: OffloadConfig) -> dict[str, int]:
    """Return the bytes of every tier that the processes of this machine may take together."""
    free = {tier.name: sum(map(topology.node_free_bytes, tier.node_ids)) for tier in topology.tiers}
    nodes = {node for tier in topology.tiers for node in tier.node_ids}  # tier `cxl` may be backed by those of `dram`
    together = sum(map(topology.node_free_bytes, nodes))
    # control groups may allow less than what is free on all nodes
    fraction = min(1.0, topology.host_available_bytes() / together) if together else 0.0
    budgets = config.budgets()
    room = {name: min(int(nbytes * fraction), budgets.get(name, nbytes)) for name, nbytes in free.items()}
    ssd = config.ssd()
    return room if ssd is None else {**room, SSD: ssd_capacity_bytes(ssd)}


def seen_from(topology: Topology, near: Sequence[int], host: HostCpus, cpus: Sequence[int]) -> Topology:
    """Return the same tiers, each of which fills the nodes that are nearest to a process first."""

    def seen(tier: Tier) -> Tier:
        distance_of = {node: min(host.distance(own, node) for own in near) for node in tier.node_ids}
        distance_of |= dict.fromkeys(near, LOCAL)
        found = [replace(node, distance=distance_of[node.node_id]) for node in tier.nodes]
        found.sort(key=lambda node: (node.distance, node.node_id))
        return replace(tier, nodes=tuple(found), nearest_first=len({node.distance for node in found}) > 1)

    return replace(topology, tiers=tuple(map(seen, topology.tiers)), measured_on=frozenset(cpus))


@dataclass(frozen=True, slots=True)
class RankBinding:
    topology: Topology  # the machine as this process sees it
    budgets: dict[str, int]  # bytes that it may take of every tier with a budget
    room: dict[str, int]  # bytes that it may take of the others; empty where no other process shares the machine
    ssd: SsdOptions | None  # its folders and its share of the tier `ssd`; None where there is none

    notes: tuple[str, ...]  # for the report: CPUs and threads, nodes, the share of every tier, and what is unusual


def bind_rank(
    rank: int,
    local_rank: int,
    num_local_ranks: int,
    device: torch.device,
    config: OffloadConfig,
    topology: Topology,
    gather: Callable[[RankFacts], Sequence[RankFacts]],
) -> RankBinding:
    """Bind this process to its part of the machine, and return that. `gather` returns what all give, by local rank."""
    root = topology.root or Path("/")
    for name in config.budgets():
        topology.tier(name)
    mode = _bind_as_torch_does(config.numa_binding, device)
    room = measure_room(topology, config) if local_rank == 0 else {}
    own = RankFacts(device_node(device, root), tuple(sorted(os.sched_getaffinity(0))), room)
    facts = gather(own)
    host = read_host_cpus(root, own.cpus)
    place, seen, budgets = decide_places(facts, mode, host)[local_rank], topology, config.budgets()
    if place.is_bound:
        seen = seen_from(topology, place.node_ids, host, own.cpus)
    shares = {name: nbytes // num_local_ranks for name, nbytes in facts[0].room.items()}
    room = {}
    if num_local_ranks > 1:
        room = {name: shares[name] for name in topology.names if name not in budgets}
        budgets = {name: shares[name] for name in budgets}
    ssd = config.ssd()
    if ssd is not None:
        paths = tuple(path / f"rank-{rank}" for path in ssd.paths)
        ssd = replace(ssd, paths=paths, budget_bytes=shares[SSD], is_part=True)
    notes, who = [], f"local rank {local_rank} of {num_local_ranks}"
    if place.is_bound:
        where = "" if own.device_node is None else f", device at node {own.device_node}"
        nodes = ", ".join(map(str, place.node_ids))
        notes.append(f"{who}: CPUs {id_ranges(place.cpus)} of node {nodes}{where} ({mode})")
        notes += [f"{who} sees {tier.describe()}" for tier in seen.tiers]
    if config.numa_binding and (place.is_bound or num_local_ranks > 1):
        # its part of the CPUs, within its control group's quota and OMP's limit
        given = os.environ.pop(_THREADS, "").split(",")[0].strip()
        allowed = _cpu.available_threads()  # without the variable: what the CPUs and the quota allow
        limits = [len(place.cpus) // place.num_sharers]
        if allowed < len(own.cpus):
            limits.append(allowed // num_local_ranks)
        if given.isdigit() and not (given == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
            limits.append(int(given))
        threads = max(1, min(limits))
        os.environ[_THREADS] = str(threads)
        torch.set_num_threads(threads)
        notes.append(f"{who}: {threads} thread{'s' if threads > 1 else ''}")
    if num_local_ranks > 1:
        parts = ", ".join(f"{format_bytes(nbytes)} of {name}" for name, nbytes in shares.items())
        folders = "" if ssd is None else f" in {', '.join(map(str, ssd.paths))}"
        notes.append(f"{who} may take {parts}{folders}: the memory of this machine is divided")
    if place.is_bound and mode == "auto":
        move_threads(place.cpus)
    return RankBinding(seen, budgets, room, ssd, (*notes, *place.notes))


def _bind_as_torch_does(mode: str | Literal[False], device: torch.device) -> str | Literal[False]:
    """Let torch bind this process in one of its modes, and return the mode; ``"auto"`` for a device that is no GPU."""
    if mode in ("auto", False):
        return mode
    if device.type != "cuda":
        return "auto"
    bind = find("torch.numa.binding", "_maybe_apply_numa_binding_to_current_process", f"honour numa_binding={mode!r}")
    try:
        bind(gpu_index=device.index or 0, numa_options=NumaOptions(AffinityMode(mode)))
    except Exception as error:  # of any kind: torch expects none
        raise ConfigError(f'numa_binding={mode!r} cannot be honoured: {error}. Choose "auto" or False') from error
    return mode


def device_node(device: torch.device, root: Path = Path("/")) -> int | None:
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
