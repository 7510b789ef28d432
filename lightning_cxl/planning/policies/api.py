"""What a policy that plans a whole job is: `PlanningPolicy` and its answer, `Decision`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lightning_cxl.machine.machine import Machine, Split
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.jobs.job import Job


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a job's roles go. What a decorator or rule places is not in it."""

    splits: Mapping[TensorRole, Split]
    reasons: Mapping[TensorRole, str]
    """Why, one line per role."""


class PlanningPolicy(Protocol):
    """Places a job's memory classes once, before anything is allocated. Must not keep state.

    A class of your own is named by its import path, e.g. ``policy="my_package.placement.MyPolicy"``; it is constructed
    without arguments. One that does not look at speeds says so with a class attribute ``needs_speeds = False``, and may
    then be used on machines whose speeds are not known.
    """

    def decide(self, job: Job, machine: Machine) -> Decision:
        """Return a split for every role that `job` leaves open.

        Args:
            job: every class of it; those with a tier are fixed, and their bytes are taken from that tier first.
            machine: `capacity_bytes` of its tiers is what the job may use.

        Raises:
            TierFullError: it does not fit.
        """
