"""The share of one process in the budget of every tier: processes of one machine have its memory once, together."""

from collections.abc import Mapping, Sequence

from lightning_cxl.machine.ranks.host_cpus import HostCpus
from lightning_cxl.machine.topology import Tier, Topology

_FAIR = 0.9
"""What is sharded is divided evenly, so the process with the least room decides what fits: who is near to a card gets
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
        topology: of the whole machine.
        budgets: those of the user, for all processes together; a tier without one is limited by its free memory.
        free_bytes: of every node, measured once for all processes.
        available_bytes: of all nodes together: control groups may allow less than what is free.
        near: the nodes of every process.
        host: tells distances.
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
