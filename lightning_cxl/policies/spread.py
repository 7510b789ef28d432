"""Interleaving over nodes as the kernel does it: equal shares until a node is full, whose part the others then take."""

from collections.abc import Sequence

from lightning_cxl.planner.machine import MachineTier, Split
from lightning_cxl.policies.room import Room
from lightning_cxl.tiers.placement import TensorRole


def spread(role: TensorRole, nbytes: int, tiers: Sequence[MachineTier], room: Room) -> Split:
    """Return the split of `nbytes` that are interleaved by pages over all nodes of some tiers; nothing is taken.

    Raises:
        TierFullError: the tiers together have less left.
    """
    bytes_on = dict.fromkeys((tier.name for tier in tiers), 0.0)
    left = {tier.name: float(room.left(tier.name)) for tier in tiers}
    to_place = float(nbytes)
    while to_place > 0.5:
        able = [tier for tier in tiers if left[tier.name] > 0]
        if not able:
            raise room.full(role, nbytes, "` and `".join(bytes_on) or "cxl")
        num_nodes = sum(tier.num_nodes for tier in able)
        # as much as can go to all of them at equal shares before the first is full
        part = min([to_place, *(left[tier.name] * num_nodes / tier.num_nodes for tier in able)])
        for tier in able:
            bytes_on[tier.name] += part * tier.num_nodes / num_nodes
            left[tier.name] = max(0.0, left[tier.name] - part * tier.num_nodes / num_nodes)
        to_place -= part
    total = sum(bytes_on.values())
    if not total:  # no bytes: where they would go
        able = [tier for tier in tiers if left[tier.name] > 0] or [*tiers, *room.tiers][:1]
        return {tier.name: tier.num_nodes / sum(each.num_nodes for each in able) for tier in able}
    return {name: size / total for name, size in bytes_on.items() if size}
