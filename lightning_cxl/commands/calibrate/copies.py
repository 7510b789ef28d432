"""Bandwidths of copies between the memory of every node and the devices: each device alone, and all together."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from lightning_cxl.commands.calibrate.nodes import node_resources
from lightning_cxl.commands.calibrate.options import Figure, Options
from lightning_cxl.commands.measuring.timing import Contender, measure
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.split_stacks import Pinner, make_pinner
from lightning_cxl.transfer.engine import TransferEngine

H2D, D2H = "h2d", "d2h"
_FEW_BYTES = 4096


class Copies(NamedTuple):
    """What copies reach: devices by their number in the list of engines, nodes by their id."""

    alone: Mapping[tuple[int, int, str], Figure]
    """Bytes per second of one device by device, node and direction."""
    together: Mapping[tuple[int, str], Figure]
    """Bytes per second of all devices at the same time by node and direction."""
    latency_s: Mapping[int, Figure]
    """Of a copy of a few bytes, by device."""


def pinned(topology: Topology) -> Pinner:
    """Return what page-locks memory; a copy from other memory would measure something else, so failing is an error."""
    return make_pinner(topology, required=True)


def measure_copies(
    topology: Topology,
    engines: Sequence[TransferEngine],
    options: Options,
    node_ids: Sequence[int],
    pin: Pinner,
) -> Copies:
    """Measure copies of every node and device, in turns.

    Args:
        topology: the machine, really there.
        engines: one per device.
        options: how thoroughly.
        node_ids: where host memory is taken.
        pin: page-locks it, see `pinned`.

    Raises:
        PinnedMemoryError: memory cannot be page-locked.
        TierFullError: a node has no room for one buffer per device.
    """
    resources = node_resources(topology)
    alone: dict[str, tuple[int, int, str]] = {}
    together: dict[str, tuple[int, str]] = {}
    contenders: list[Contender] = []
    on_device = [torch.empty(options.copy_bytes, dtype=torch.uint8, device=engine.device) for engine in engines]
    for node_id in node_ids:
        nbytes = options.copy_bytes * len(engines)
        host = pin(resources[node_id]).allocate(nbytes).tensor((len(engines), options.copy_bytes), torch.uint8)
        for direction in (H2D, D2H):
            jobs = [_Job(*job, direction) for job in zip(engines, on_device, host, strict=True)]
            for index, job in enumerate(jobs):
                name = f"node {node_id} device {index} {direction}"
                alone[name] = index, node_id, direction
                contenders.append(_contender(name, [job]))
            name = f"node {node_id} {direction}"
            together[name] = node_id, direction
            contenders.append(_contender(name, jobs))
    for index, (engine, device) in enumerate(zip(engines, on_device, strict=True)):
        few = host[index, :_FEW_BYTES]
        contenders.append(_contender(f"device {index}", [_Job(engine, device[:_FEW_BYTES], few, H2D)]))
    timings = measure(contenders, options.rounds)

    def speed(name: str) -> Figure:
        return Figure(timings.traffic_bytes[name] / timings.median(name), timings.spread(name))

    return Copies(
        {key: speed(name) for name, key in alone.items()},
        {key: speed(name) for name, key in together.items()},
        {i: Figure(timings.median(f"device {i}"), timings.spread(f"device {i}")) for i in range(len(engines))},
    )


class _Job(NamedTuple):
    engine: TransferEngine
    device: torch.Tensor
    host: torch.Tensor
    direction: str


def _contender(name: str, jobs: Sequence[_Job]) -> Contender:
    """Return copies that start together; done when all are."""

    def run() -> None:
        started = [
            job.engine.h2d(job.host, job.device) if job.direction == H2D else job.engine.d2h(job.device, job.host)
            for job in jobs
        ]
        for transfer in started:
            transfer.wait_host()

    return Contender(name, lambda: run, traffic_bytes=sum(job.host.numel() for job in jobs))
