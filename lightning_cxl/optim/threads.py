"""Threads of the kernels: how many, with which instructions, and on machines with several nodes which update what.

A *team* is the threads of one node with CPUs. It first updates what lies on that node, or on memory-only nodes near it.
"""

import operator
import warnings
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError, LightningCXLWarning
from lightning_cxl.machine.topology import nearest_cpu_nodes, usable_cpus
from lightning_cxl.memory.resource import node_at
from lightning_cxl.native import _adam, _cpu

_LAUNCHING_THREADS = 2


def thread_count(num_threads: int | None) -> int:
    """Return how many threads to use; None for what the process may use."""
    if num_threads is None:
        return _cpu.available_threads()
    try:
        count = operator.index(num_threads)
    except TypeError:
        count = 0
    if count < 1:
        raise ConfigError(f"num_threads must be at least 1, got {num_threads!r}: give a whole number, or None for all")
    return count


def chosen_isa(isa: str | None) -> str:
    if isa is not None and isa not in _cpu.supported_isas():
        raise ConfigError(f"isa {isa!r} cannot be used: this CPU supports {', '.join(_cpu.supported_isas())}")
    return _cpu.best_isa() if isa is None else isa


def kernel_threads(config: OffloadConfig, computes_on_host: bool) -> int:
    """Return how many threads the kernels of a run take: what the user asks for, else what the process may use.

    Where they run behind what a device does, two cores are left to those who keep it busy: the thread that queues the
    forward, and autograd's, which queues the backward.
    """
    if config.num_threads is not None or computes_on_host or not config.overlaps_step(computes_on_host):
        return thread_count(config.num_threads)
    return max(1, thread_count(None) - _LAUNCHING_THREADS)


class Stretch(NamedTuple):
    """Elements `begin` to `end` of a tensor, in memory order, that one team updates."""

    begin: int
    end: int
    team: int


class ThreadTeams:
    """Divides tensors over the teams of this process.

    Args:
        cpus: of this process, by node that has some. The kernel's masks end at CPU 1023; it does without the others.
        where: tells the node of an address. Where it may not ask (OSError, as in many containers), one team has
            everything and threads run anywhere: slower on such a machine, and never wrong.
    """

    def __init__(
        self,
        cpus: Mapping[int, tuple[int, ...]],
        nearest: Mapping[int, int],
        where: Callable[[int], int | None] = node_at,
    ) -> None:
        self._team_of_node = {node: team for team, node in enumerate(sorted(cpus))}
        self._nearest = nearest
        self._where: Callable[[int], int | None] | None = where
        pairs = [(self._team_of_node[node], cpu) for node in sorted(cpus) for cpu in cpus[node] if cpu < _adam.MAX_CPUS]
        self.cpus = array("q", [number for pair in pairs for number in pair])
        """Pairs of team and CPU, as the kernel takes them."""

    @classmethod
    def detect(cls, root: Path = Path("/"), allowed: frozenset[int] | None = None) -> "ThreadTeams | None":
        """Return the teams of this machine; None where this process has CPUs of one node only: all are near then."""
        cpus = usable_cpus(root, allowed)
        return cls(cpus, nearest_cpu_nodes(root, frozenset(cpus))) if len(cpus) > 1 else None

    def stretches(self, flat: torch.Tensor) -> list[Stretch]:
        """Divide a dense tensor in whole chunks of the kernel; the first page of each is asked for."""
        found: list[Stretch] = []
        if self._where is None:
            return [Stretch(0, flat.numel(), 0)] if flat.numel() else found
        for begin in range(0, flat.numel(), _adam.CHUNK):
            end = min(begin + _adam.CHUNK, flat.numel())
            try:
                node = self._where(flat.data_ptr() + begin * flat.element_size())
            except OSError as error:
                self._give_up(error)
                return self.stretches(flat)
            team = 0 if node is None else self._team_of_node.get(self._nearest.get(node, node), 0)
            if found and found[-1].team == team:
                found[-1] = Stretch(found[-1].begin, end, team)
            else:
                found.append(Stretch(begin, end, team))
        return found

    def _give_up(self, error: OSError) -> None:
        self._where = None
        self.cpus = array("q")  # with all work in one team, its CPUs would get all threads
        warnings.warn(
            f"the kernel refuses to say where pages are ({error}): threads of the optimizer step run anywhere, which "
            "is slower on a machine with several nodes. In a container allow the system call move_pages",
            LightningCXLWarning,
            stacklevel=2,
        )
