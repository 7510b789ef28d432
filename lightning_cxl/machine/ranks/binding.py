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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lightning_cxl.config import OffloadConfig
from lightning_cxl.devices.device_type import device_type_of
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.disk_space import ssd_capacity_bytes
from lightning_cxl.machine.nodes import read_text
from lightning_cxl.machine.ranks.budgets import share_budgets
from lightning_cxl.machine.ranks.host_cpus import read_host_cpus
from lightning_cxl.machine.ranks.places import RankFacts, RankPlace, decide_places, id_ranges
from lightning_cxl.machine.ranks.ssd_share import share_ssd
from lightning_cxl.machine.ranks.view import seen_from
from lightning_cxl.machine.topology import Topology
from lightning_cxl.native import _cpu
from lightning_cxl.ssd_options import SSD, SsdOptions
from lightning_cxl.units import format_bytes

Gather = Callable[[RankFacts], Sequence[RankFacts]]
"""Returns what all processes of this machine gave, by local rank."""
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class RankBinding:
    """What one process takes of its machine."""

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
        """What is not as one would expect, one sentence each."""
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
        local_rank: of this process, among those of its machine.
        num_local_ranks: how many there are.
        device: what this process computes on.
        config: of the run.
        topology: of the whole machine.
        gather: how the processes of this machine tell each other something; needed where there are several.
        rank: of this process, among those of all machines; None where there is one machine.

    Returns:
        What this process uses from now on; `Host` takes it.

    Raises:
        ConfigError: ``numa_binding="exclusive"`` with fewer cores than processes; no `gather`, or one that does not
            return one answer of each process; a path of the tier `ssd` that is no folder.
        TierNotFoundError: a budget for a tier that does not exist.
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
    """Return the threads of this process: its part of its CPUs, within the quota of its control group and OMP's limit.

    Args:
        place: what the process gets.
        num_cpus: those that it could use before.
        num_local_ranks: all have one quota.
    """
    given = os.environ.pop(_THREADS, "").split(",")[0].strip()
    allowed = _cpu.available_threads()  # without the variable: what the CPUs and the quota allow
    limits = [len(place.cpus) // place.num_sharers]
    if allowed < num_cpus:
        limits.append(allowed // num_local_ranks)
    if given.isdigit() and not (given == "1" and "TORCHELASTIC_RUN_ID" in os.environ):
        limits.append(int(given))
    return max(1, min(limits))
