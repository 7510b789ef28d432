"""Latency of memory: a chain of loads, each of which must wait for the one before."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_cxl.commands.calibrate.nodes import Caches, node_resources, room_bytes
from lightning_cxl.commands.calibrate.options import Figure, Options
from lightning_cxl.commands.measuring.timing import Contender, measure
from lightning_cxl.machine.cpus import nearest_cpu_nodes, usable_cpus
from lightning_cxl.machine.topology import Topology
from lightning_cxl.native import _membench

_CACHES = 4  # as many times as large is a chain


class Chase:
    """A walk through all lines of a memory in random order; call it to go on for some steps.

    It goes on where it was, so a line comes again only after all others: caches that keep what was used last have it
    no longer.

    Args:
        memory: a power of two of bytes, at least one line; written.
        steps: loads per call.
        cpus: where to run; None leaves that to the kernel.
    """

    def __init__(self, memory: torch.Tensor, steps: int, cpus: tuple[int, ...] | None = None) -> None:
        lines = memory.view(torch.int64).view(-1, _membench.LINE_WORDS)
        order = torch.randperm(len(lines))
        lines[order, 0] = order.roll(-1)
        self._links: Any = memory.view(torch.uint64).numpy()
        self._steps = steps
        self._cpus = cpus
        self.line = 0

    def __call__(self) -> None:
        """Go on."""
        before = os.sched_getaffinity(0)
        try:
            if self._cpus is not None:
                os.sched_setaffinity(0, self._cpus)  # of this thread
            self.line = _membench.chase(self._links, self.line, self._steps)
        finally:
            os.sched_setaffinity(0, before)


def measure_latency(topology: Topology, options: Options, caches: Caches, node_ids: list[int]) -> dict[int, Figure]:
    """Return nanoseconds per load by node, from a CPU that is nearest to it, through huge pages where there are any."""
    root = topology.root or Path("/")
    cpus = usable_cpus(root)
    nearest = nearest_cpu_nodes(root, frozenset(cpus))
    resources = node_resources(topology)
    contenders = []
    for node_id in node_ids:
        wanted = 1 << (max(options.chase_bytes, _CACHES * caches.largest_bytes) - 1).bit_length()
        nbytes = 1 << room_bytes(topology, node_id, wanted, parts=len(node_ids)).bit_length() - 1
        memory = resources[node_id].allocate(nbytes).tensor((nbytes,), torch.uint8)
        run_on = cpus.get(nearest.get(node_id, node_id))
        contenders.append(Contender(str(node_id), partial(Chase, memory, options.chase_steps, run_on)))
    timings = measure(contenders, options.rounds)
    scale = 1e9 / options.chase_steps
    return {n: Figure(timings.median(str(n)) * scale, timings.spread(str(n))) for n in node_ids}
