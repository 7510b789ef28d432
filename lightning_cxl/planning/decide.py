"""`decide`: where everything of a run goes, before any of it is allocated. See [Note: One inventory].

A policy that plans (`PlanningPolicy`) sees the whole inventory as one job; another one is asked tensor by tensor, about
all of them with what is free now. What does not fit is refused here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_cxl.config import OnTierFull
from lightning_cxl.inventory.inventory import Inventory
from lightning_cxl.memory.host_tensors import is_ordinary
from lightning_cxl.memory.ordinary import anonymous_bytes
from lightning_cxl.memory.stacks import HostMemory
from lightning_cxl.placement.placer import Placer
from lightning_cxl.planning.fit import check_fits
from lightning_cxl.planning.placements import Placements
from lightning_cxl.planning.run_policy import RunPolicy


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What a run may fill."""

    tiers: Mapping[str, int]
    """Bytes of every tier."""
    together: int
    """Bytes of all tiers: they may share memory or a limit."""


def decide(
    inventory: Inventory, policy: RunPolicy, memory: HostMemory, placer: Placer, on_tier_full: OnTierFull
) -> Placements:
    """Return where every tensor of the inventory goes.

    Args:
        inventory: of the run.
        policy: of the run.
        memory: of the run.
        placer: asks the policy before this decision; the decision gets one of its own.
        on_tier_full: whether a full tier spills or refuses.

    Raises:
        ConfigError: the policy leaves something out.
        TierFullError: the run does not fit where the policy wants it.
    """
    free = free_for(inventory.model, memory)
    decided = policy.decide(inventory, free.tiers, free.together)
    placements = Placements(inventory.asked, placer.with_policy(decided), pin=memory.pins)
    requests = [(each.role, each.nbytes, placements.of(each)) for each in inventory.tensors]
    check_fits(requests, free.tiers, on_tier_full, most=free.together)
    return placements


def free_for(model: nn.Module, memory: HostMemory) -> FreeMemory:
    """Return what a run of a model may fill: what is free, and what the model's weights take already.

    Free is what every tier has within its budget. Weights move when a run begins, so their present bytes count, on
    their tier or in ordinary memory.
    """
    topology = memory.topology
    own = dict.fromkeys(topology.names, 0)
    others = []
    for parameter in filter(is_ordinary, model.parameters()):
        tier = memory.tier_at(parameter.data_ptr()) if parameter.numel() else None
        if tier is None:
            others.append(parameter)
        else:
            own[tier.name] += parameter.nbytes
    freed = dict.fromkeys(topology.names, 0)  # when weights in ordinary memory have moved
    for node, nbytes in anonymous_bytes(others, topology.tiers[0].node_ids[0]).items():
        if (tier := topology.node_tier(node)) is not None:
            freed[tier.name] += nbytes
    accounts, tiers = memory.stats()["tiers"], {}
    for name, free in memory.free_bytes().items():
        budget_left = accounts[name]["budget_bytes"] - accounts[name]["used_bytes"]
        tiers[name] = min(free + freed[name], budget_left) + own[name]
    return FreeMemory(tiers, topology.host_available_bytes() + sum(freed.values()) + sum(own.values()))
