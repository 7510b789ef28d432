"""The greedy allocator of arXiv 2507.03305: local memory goes first to what the CPUs' optimizer touches."""

from lightning_cxl.machine.machine import Machine, MachineTier, Split
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.jobs.job import Job, MemoryClass
from lightning_cxl.planning.policies.api import Decision
from lightning_cxl.planning.policies.order import in_order
from lightning_cxl.planning.policies.room import Room
from lightning_cxl.planning.policies.spread import spread
from lightning_cxl.units import format_bytes


class LatencyFirst:
    """The authors' rule, exactly as coded in their utils/numa_allocation_patch.py.

    In the order of `LEVELS`: a class that fits in what is left of local DRAM goes there; one that does not, while any
    is left, is interleaved with equal weights over DRAM and all cards, and takes at most its equal share of DRAM; later
    ones are interleaved over the cards. Beyond the paper: a class whose size is not known yet (0 bytes: activations
    before the first batch) lies on the cards, so that it does not take the DRAM that was promised to others.
    """

    needs_speeds = False

    def decide(self, job: Job, machine: Machine) -> Decision:
        """Return the greedy outcome.

        Raises:
            TierFullError: the cards cannot hold the rest.
        """
        room = Room(job, machine)
        dram = [tier for tier in room.tiers if tier.kind is TierKind.DRAM]
        cards = [tier for tier in room.tiers if tier.kind is TierKind.CXL]
        num_nodes = sum(tier.num_nodes for tier in cards)
        splits: dict[TensorRole, Split] = {}
        reasons: dict[TensorRole, str] = {}
        for each in in_order(job):
            local = sum(room.left(tier.name) for tier in dram)
            if not each.nbytes and cards:
                split, why = spread(each.role, 0, cards, room), "size not known yet: on the cards"
            elif local >= each.nbytes:
                split, why = spread(each.role, each.nbytes, dram, room), "fits in DRAM, which the CPUs are nearest to"
            elif local > 0 and cards:
                taken = min(local, each.nbytes // (1 + num_nodes))
                split = mixed(each, taken, dram, cards, room)
                why = f"mixed: interleaved equally, {format_bytes(local)} of DRAM were left"
            elif cards:
                split, why = spread(each.role, each.nbytes, cards, room), "DRAM is used up: striped over the cards"
            else:
                raise room.full(each.role.value, each.nbytes, "` and `".join(tier.name for tier in dram))
            room.take(each.role, each.nbytes, split)
            splits[each.role], reasons[each.role] = split, why
        return Decision(splits, reasons)


def mixed(each: MemoryClass, local: int, dram: list[MachineTier], cards: list[MachineTier], room: Room) -> Split:
    """Return the split of a class of which `local` bytes lie in DRAM and the rest on the cards."""
    parts = ((local, dram), (each.nbytes - local, cards))
    split: Split = {}
    for nbytes, tiers in parts:
        if nbytes:
            own = spread(each.role, nbytes, tiers, room)
            split |= {name: share * nbytes / each.nbytes for name, share in own.items()}
    return split
