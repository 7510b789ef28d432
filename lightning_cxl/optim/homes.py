"""`ThreadHomes`: which threads update which part of a tensor, on a machine with several nodes that have CPUs."""

import warnings
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from lightning_cxl import _adam
from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.machine.cpus import nearest_cpu_nodes, usable_cpus
from lightning_cxl.memory.numa import node_at


class Run(NamedTuple):
    """Elements `begin` to `end` of a tensor, in memory order, that one home updates."""

    begin: int
    end: int
    home: int


class ThreadHomes:
    """A home is a node with CPUs: its threads first update what lies on it, or on memory-only nodes near it.

    Args:
        cpus: of this process, by node that has some. The kernel's masks end at CPU 1023; it does without the others.
        nearest: for every node with memory, the nearest node with CPUs.
        where: tells the node of an address. Where it may not ask (OSError, as in many containers), everything is in
            one home and threads run anywhere: slower on such a machine, and never wrong.
    """

    def __init__(
        self,
        cpus: Mapping[int, tuple[int, ...]],
        nearest: Mapping[int, int],
        where: Callable[[int], int | None] = node_at,
    ) -> None:
        self._home_of_node = {node: home for home, node in enumerate(sorted(cpus))}
        self._nearest = nearest
        self._where: Callable[[int], int | None] | None = where
        pairs = [(self._home_of_node[node], cpu) for node in sorted(cpus) for cpu in cpus[node] if cpu < _adam.MAX_CPUS]
        self.cpus = array("q", [number for pair in pairs for number in pair])
        """Pairs of home and CPU, as the kernel takes them."""

    @classmethod
    def detect(cls, root: Path = Path("/"), allowed: frozenset[int] | None = None) -> "ThreadHomes | None":
        """Return the homes of this machine; None where this process has CPUs of one node only: all are near then."""
        cpus = usable_cpus(root, allowed)
        return cls(cpus, nearest_cpu_nodes(root, frozenset(cpus))) if len(cpus) > 1 else None

    def runs(self, flat: torch.Tensor) -> list[Run]:
        """Return the runs of a dense tensor in whole chunks of the kernel; the first page of each is asked for."""
        runs: list[Run] = []
        if self._where is None:
            return [Run(0, flat.numel(), 0)] if flat.numel() else runs
        for begin in range(0, flat.numel(), _adam.CHUNK):
            end = min(begin + _adam.CHUNK, flat.numel())
            try:
                node = self._where(flat.data_ptr() + begin * flat.element_size())
            except OSError as error:
                self._give_up(error)
                return self.runs(flat)
            home = 0 if node is None else self._home_of_node.get(self._nearest.get(node, node), 0)
            if runs and runs[-1].home == home:
                runs[-1] = Run(runs[-1].begin, end, home)
            else:
                runs.append(Run(begin, end, home))
        return runs

    def _give_up(self, error: OSError) -> None:
        self._where = None
        self.cpus = array("q")  # with all work in one home, its CPUs would get all threads
        warnings.warn(
            f"the kernel refuses to say where pages are ({error}): threads of the optimizer step run anywhere, which "
            "is slower on a machine with several nodes. In a container allow the system call move_pages",
            LightningCXLWarning,
            stacklevel=2,
        )
