"""`decide`: where everything of a run goes, before any of it is allocated. See [Note: One inventory].

A policy that plans (`PlanningPolicy`) sees the whole inventory as one job; another one is asked tensor by tensor, about
all of them with what is free now. What does not fit is refused here.
"""

from lightning_cxl.config import OnTierFull
from lightning_cxl.inventory.inventory import Inventory
from lightning_cxl.memory.stacks import HostMemory
from lightning_cxl.placement.placer import Placer
from lightning_cxl.planning.fit import check_fits
from lightning_cxl.planning.free_memory import free_for
from lightning_cxl.planning.placements import Placements
from lightning_cxl.planning.run_policy import RunPolicy
from lightning_cxl.planning.ssd_room import SsdRoom


def decide(
    inventory: Inventory,
    policy: RunPolicy,
    memory: HostMemory,
    placer: Placer,
    on_tier_full: OnTierFull,
    ssd: SsdRoom | None = None,
) -> Placements:
    """Return where every tensor of the inventory goes.

    Args:
        inventory: of the run.
        policy: of the run.
        memory: of the run.
        placer: asks the policy before this decision; the decision gets one of its own.
        on_tier_full: whether a full tier spills or refuses.
        ssd: how much the tier `ssd` may hold; None where there is none.

    Raises:
        ConfigError: the policy leaves something out.
        TierFullError: the run does not fit where the policy wants it.
    """
    free = free_for(inventory.model, memory)
    decided = policy.decide(inventory, free)
    placements = Placements(inventory.asked, placer.with_policy(decided), pin=memory.pins)
    requests = [(each.role, each.nbytes, placements.of(each)) for each in inventory.tensors]
    if set(memory.topology.names) - set(free.tiers):  # the policy has asked for one tier more
        free = free_for(inventory.model, memory)
    check_fits(requests, free.tiers, on_tier_full, most=free.together)
    if ssd is not None:
        ssd.check(inventory.ssd_records)
    return placements
