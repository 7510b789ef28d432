"""The tiers of a machine as one process sees them: its own socket's memory first, then the others by distance."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_cxl.machine.nodes import Node
from lightning_cxl.machine.ranks.host_cpus import LOCAL, HostCpus
from lightning_cxl.machine.topology import Tier, Topology


def seen_from(topology: Topology, near: Sequence[int], host: HostCpus, cpus: Sequence[int]) -> Topology:
    """Return the same tiers, each of which fills the nodes that are nearest to a process first.

    So `dram` is the memory of its socket until that is full, and `cxl` the card of its socket.

    Args:
        topology: of the whole machine.
        near: the nodes of the process.
        host: tells distances.
        cpus: those that the process had before it was bound.
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
