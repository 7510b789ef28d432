"""Interleaving over nodes as the kernel does it: equal shares until a node is full, whose part the others then take."""

from collections.abc import Mapping, Sequence

from lightning_cxl.machine.machine import MachineTier, Split
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.policies.room import Room


def spread(role: TensorRole, nbytes: int, tiers: Sequence[MachineTier], room: Room) -> Split:
    """Return the split of `nbytes` that are interleaved by pages over all nodes of some tiers; nothing is taken.

    Raises:
        TierFullError: the tiers have less left.
    """
    left = {tier.name: float(room.left(tier.name)) for tier in tiers}
    bytes_on, rest = fill(nbytes, {tier.name: float(tier.num_nodes) for tier in tiers}, left)
    if nbytes and rest > 0.5:
        raise room.full(role.value, nbytes, "` and `".join(bytes_on) or "cxl")
    total = sum(bytes_on.values())
    if not total:  # no bytes: where they would go
        able = [tier for tier in tiers if left[tier.name] > 0] or [*tiers, *room.tiers][:1]
        return {tier.name: tier.num_nodes / sum(each.num_nodes for each in able) for tier in able}
    return {name: size / total for name, size in bytes_on.items() if size}


def fill(nbytes: float, weights: Mapping[str, float], left: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """Return how bytes lie on tiers in proportion to weights, as long as all have room, and what fits on none.

    Args:
        nbytes: to be placed.
        weights: of the tiers; a full one leaves its part to the others.
        left: what each tier still has.
    """
    bytes_on = dict.fromkeys(weights, 0.0)
    room, to_place = dict(left), float(nbytes)
    while to_place > 0.5 and (able := [name for name in weights if room[name] > 0]):
        total = sum(weights[name] for name in able)
        # as much as can go to all of them before the first is full
        part = min([to_place, *(room[name] * total / weights[name] for name in able)])
        for name in able:
            bytes_on[name] += part * weights[name] / total
            room[name] = max(0.0, room[name] - part * weights[name] / total)
        to_place -= part
    return bytes_on, to_place
