"""What others are compared with: everything in DRAM, interleaved over all nodes, or as a run without speeds has it."""

from lightning_cxl.machine.machine import Machine
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.placement.policy import home_kinds
from lightning_cxl.planning.jobs.job import Job
from lightning_cxl.planning.policies.api import Decision
from lightning_cxl.planning.policies.latency_first import mixed
from lightning_cxl.planning.policies.order import in_order
from lightning_cxl.planning.policies.room import Room
from lightning_cxl.planning.policies.spread import spread


class DramOnly:
    """Everything in DRAM; what does not fit there does not run."""

    needs_speeds = False

    def decide(self, job: Job, machine: Machine) -> Decision:
        """Return all of DRAM for every role.

        Raises:
            TierFullError: it does not fit.
        """
        room = Room(job, machine)
        dram = [tier for tier in room.tiers if tier.kind is TierKind.DRAM]
        splits = {}
        for each in in_order(job):
            splits[each.role] = spread(each.role, each.nbytes, dram, room)
            room.take(each.role, each.nbytes, splits[each.role])
        return Decision(splits, dict.fromkeys(splits, "everything in DRAM"))


class Interleave:
    """Everything page by page over the nodes, as ``numactl --interleave=all``; a full one leaves its part to others."""

    needs_speeds = False

    def decide(self, job: Job, machine: Machine) -> Decision:
        """Return equal shares for every role, as long as every node has room.

        Raises:
            TierFullError: it does not fit.
        """
        room = Room(job, machine)
        nodes = list(room.tiers)
        splits = {}
        for each in in_order(job):
            splits[each.role] = spread(each.role, each.nbytes, nodes, room)
            room.take(each.role, each.nbytes, splits[each.role])
        num_nodes = sum(tier.num_nodes for tier in nodes)
        return Decision(splits, dict.fromkeys(splits, f"interleaved over all {num_nodes} nodes"))


class ByRole:
    """As `RoleHomePolicy` places in a run, role after role: what does not fit in a role's home goes to other tiers."""

    needs_speeds = False

    def decide(self, job: Job, machine: Machine) -> Decision:
        """Return each role's home and where the rest goes.

        Raises:
            TierFullError: the tiers have less left.
        """
        room = Room(job, machine)
        dram, cards = ([tier for tier in room.tiers if tier.kind is kind] for kind in (TierKind.DRAM, TierKind.CXL))
        splits, reasons = {}, {}
        for each in job.free_classes().values():
            home = home_kinds(each.role, cpu_computes=machine.device.is_host)[0]
            if each.nbytes > sum(room.left(tier.name) for tier in room.tiers):
                raise room.full(each.role.value, each.nbytes, "` and `".join(tier.name for tier in room.tiers))
            local = min(each.nbytes, sum(room.left(tier.name) for tier in dram))
            if home is TierKind.CXL:
                local = each.nbytes - min(each.nbytes, sum(room.left(tier.name) for tier in cards))
            if each.nbytes:
                splits[each.role] = mixed(each, local, dram, cards, room)
            else:
                splits[each.role] = spread(each.role, 0, (home is TierKind.CXL and cards) or dram or cards, room)
            room.take(each.role, each.nbytes, splits[each.role])
            reasons[each.role] = f"home of {each.role.value}"
        return Decision(splits, reasons)
