"""What several ranks exchange, as a part of a step: `exchanges` says how much, `ExchangeLoads` what it keeps busy.

A gather or a reduction takes as long as the busier of two ways, and its latencies::

    peer links    peer_bytes / peer_bytes_per_s          each device sends and receives at the same time
    network       network_bytes / network_bytes_per_s    so does each machine
                  + hops * latency                       of the network where machines take part, else of peer links

Where devices have no links to each other, what they exchange goes through host memory: out over the link of one device,
and in over that of another one. Where the CPU is the device, it is written and read by it.
"""

from dataclasses import dataclass

from lightning_cxl.errors import ConfigError
from lightning_cxl.inventory.mesh import Mesh
from lightning_cxl.machine.machine import Machine
from lightning_cxl.planning.jobs.collectives import Volume
from lightning_cxl.planning.jobs.job import Exchange, Job, Phase

PEERS, NETWORK, SOCKETS = "peer links", "network", "between sockets"
"""Names of the resources."""


def exchanges(
    volume: Volume, mesh: Mesh, num_groups: int, num_micro_batches: int, num_reductions: int
) -> tuple[Exchange, ...]:
    """Return what the ranks exchange in one step.

    Args:
        volume: of the step.
        mesh: the ranks.
        num_groups: that are gathered and reduced.
        num_micro_batches: of the step.
        num_reductions: of every gradient in the step.
    """
    if not mesh.is_sharded:
        return ()
    crosses = mesh.num_shards > mesh.num_devices
    ring, replicas = mesh.num_shards - 1, mesh.num_replicas - 1

    def among_shards(phase: Phase, kind: str, nbytes: float, calls: int) -> Exchange:
        peer = nbytes if mesh.num_devices > 1 else 0.0
        return Exchange(phase, kind, peer, nbytes if crosses else 0.0, calls * ring)  # type: ignore[arg-type]

    gathers = 0 if mesh.shares_weights else num_groups * num_micro_batches
    reductions = num_groups * num_reductions
    found = (
        among_shards("forward", "gather", volume.forward_gather, gathers),
        among_shards("backward", "gather", volume.backward_gather, gathers),
        among_shards("backward", "reduce", volume.reduce_scatter, reductions),
        Exchange("backward", "reduce", 0.0, mesh.num_devices * volume.all_reduce, reductions * 2 * replicas),
        among_shards("update", "reduce", 16.0, 2),  # the norm, and whether the step is skipped
    )
    return tuple(each for each in found if each.peer_bytes or each.network_bytes or each.hops)


@dataclass(slots=True)
class ExchangeLoads:
    """Seconds that the exchanges of one phase keep links busy, and bytes that go through host memory instead."""

    gather: tuple[float, float] = (0.0, 0.0)
    """Of peer links, and of the network."""
    reduce: tuple[float, float] = (0.0, 0.0)
    through_host: float = 0.0
    """That each device sends, and receives."""

    @property
    def busy(self) -> tuple[float, float]:
        """Seconds of peer links and network in all."""
        return self.gather[0] + self.reduce[0], self.gather[1] + self.reduce[1]

    def plus(self, other: "ExchangeLoads", part: float) -> "ExchangeLoads":
        """Return these loads with a part of another phase's; what goes through host memory is counted there."""
        return ExchangeLoads(_plus(self.gather, other.gather, part), _plus(self.reduce, other.reduce, part))


def _plus(own: tuple[float, float], other: tuple[float, float], part: float) -> tuple[float, float]:
    return own[0] + part * other[0], own[1] + part * other[1]


def exchange_loads(job: Job, machine: Machine, phase: Phase) -> ExchangeLoads:
    """Return what the exchanges of a phase keep busy.

    Raises:
        ConfigError: machines exchange bytes, and nothing says how fast the network is.
    """
    links, found = machine.links, ExchangeLoads()
    for each in job.exchanges:
        if each.phase != phase:
            continue
        if each.network_bytes and links.network_bytes_per_s is None:
            raise ConfigError(
                f"machines exchange data, and machine `{machine.name}` does not say how fast: give "
                f"network_bytes_per_s under `links` in its file (--tiers), what one machine sends over all of its "
                "adapters, such as `network_bytes_per_s: 50 GB/s`; examples/machines/eight_gpus.yaml has all links"
            )
        crosses = each.network_bytes > 0
        latency = each.hops * (links.network_latency_s if crosses else links.peer_latency_s)
        network = each.network_bytes / (links.network_bytes_per_s or 1.0) + latency if crosses else 0.0
        peer = 0.0 if crosses else latency
        if links.peer_bytes_per_s is None or machine.device.is_host:
            found.through_host += each.peer_bytes
        else:
            peer += each.peer_bytes / links.peer_bytes_per_s
        if each.kind == "gather":
            found.gather = (found.gather[0] + peer, found.gather[1] + network)
        else:
            found.reduce = (found.reduce[0] + peer, found.reduce[1] + network)
    return found
