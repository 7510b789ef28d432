"""The two ends that others are compared with: everything in DRAM, and everything interleaved over all nodes."""

from lightning_cxl.machine.machine import Machine
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.planning.jobs.job import Job
from lightning_cxl.planning.policies.api import Decision
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
