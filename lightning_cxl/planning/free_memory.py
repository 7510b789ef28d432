"""`FreeMemory`: what a run may fill before any of it is allocated."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_cxl.memory.host_tensors import anonymous_bytes, is_ordinary
from lightning_cxl.memory.stacks import HostMemory
from lightning_cxl.shards import local
from lightning_cxl.streaming.unit_weights import tensors_by_parameter

_SLACK_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What a run may fill."""

    tiers: Mapping[str, int]
    """Bytes of every tier."""
    together: int
    """Bytes of all tiers: they may share memory or a limit."""

    @property
    def usable_bytes(self) -> int:
        """What a plan may fill of all tiers together."""
        return min(sum(map(usable, self.tiers.values())), usable(self.together))


def usable(nbytes: int) -> int:
    """Return what a plan may fill of a tier: pools have unused ends of slabs, and splits end in whole stripes."""
    return nbytes - min(nbytes // 8, _SLACK_BYTES)


def free_for(model: nn.Module, memory: HostMemory) -> FreeMemory:
    """Return what a run of a model may fill: what is free, and what the model's weights take already.

    Free is what every tier has within its budget. Weights move when a run begins, so their present bytes count, on
    their tier or in ordinary memory.
    """
    topology = memory.topology
    own = dict.fromkeys(topology.names, 0)
    others = []
    tensors = (local(tensor) for each in tensors_by_parameter(model).values() for tensor in each)
    for tensor in filter(is_ordinary, tensors):
        tier = memory.tier_at(tensor.data_ptr()) if tensor.numel() else None
        if tier is None:
            others.append(tensor)
        else:
            own[tier.name] += tensor.nbytes
    freed = dict.fromkeys(topology.names, 0)  # when weights in ordinary memory have moved
    for node, nbytes in anonymous_bytes(others, topology.tiers[0].node_ids[0]).items():
        if (tier := topology.node_tier(node)) is not None:
            freed[tier.name] += nbytes
    accounts, tiers = memory.stats()["tiers"], {}
    for name, free in memory.free_bytes().items():
        budget_left = accounts[name]["budget_bytes"] - accounts[name]["used_bytes"]
        tiers[name] = min(free + freed[name], budget_left) + own[name]
    return FreeMemory(tiers, topology.host_available_bytes() + sum(freed.values()) + sum(own.values()))
