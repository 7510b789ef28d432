"""`compare`: one job under several policies, side by side; `fits`, whether it fits host and device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_cxl.errors import ConfigError, TierFullError
from lightning_cxl.machine.machine import Machine, MachineSsd, Split
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.job import Job
from lightning_cxl.planning.policies import ByRole, DramOnly, PlanningPolicy, get_policy, plans
from lightning_cxl.planning.step import StepTime, predict_step

_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """The plan of one policy for a job."""

    policy: str
    bytes_on: Mapping[TensorRole, Mapping[str, int]]
    """By role and tier, what decorators and rules fix included; empty if it does not fit."""
    reasons: Mapping[TensorRole, str]
    time: StepTime | None
    """Predicted; None if it does not fit, or speeds are not known."""
    error: str = ""
    """Why it does not fit."""
    needs_speeds: bool = False
    """It could not decide: speeds are not known."""
    ssd_seconds: float | None = None
    """Seconds that the tier `ssd` adds to the predicted step; None if not predicted, or if the tier is empty."""

    @property
    def fits(self) -> bool:
        """Whether there is room for the job, and a decision where."""
        return not self.error and not self.needs_speeds

    def used_bytes(self, tier: str) -> int:
        """Return the bytes of all roles on a tier."""
        return sum(tiers.get(tier, 0) for tiers in self.bytes_on.values())


def compare(job: Job, machine: Machine, policies: Iterable[str]) -> dict[str, PolicyPlan]:
    """Return the plan of each policy, by name."""
    room = with_working_memory(job, machine)
    return {name: _plan(name, _planning(name), job, room) for name in policies}


def dram_only_time(job: Job, machine: Machine) -> StepTime | None:
    """Return the predicted step as if DRAM were large enough for everything; None where speeds are not known."""
    if not machine.has_speeds:
        return None
    dram = {tier.name: _UNLIMITED_BYTES for tier in machine.select(TierKind.DRAM)}
    free = job.in_memory()
    return predict_step(free, DramOnly().decide(free, machine.with_capacity(dram, _UNLIMITED_BYTES)).splits, machine)


def fits(job: Job, machine: Machine, policy: str) -> bool:
    """Return whether a job fits the tiers under a policy, and the device."""
    return fits_device(job, machine) and compare(job, machine, [policy])[policy].fits


def fits_device(job: Job, machine: Machine) -> bool:
    """Return whether a job fits the device's memory; yes where either is not known, or the host is the device."""
    device = machine.device
    return device.is_host or not device.memory_bytes or (job.device_bytes or 0) <= device.memory_bytes


def can_predict(job: Job, machine: Machine) -> bool:
    """Return whether seconds of a job can be predicted: the speeds of all that it uses are known."""
    return machine.has_speeds and (not job.ssd_bytes or (machine.ssd is not None and machine.ssd.has_speeds))


def with_working_memory(job: Job, machine: Machine) -> Machine:
    """Return the machine that is left when the CPU computes: what it works in lies in DRAM."""
    working = working_bytes(job, machine)
    if not working:
        return machine
    left, capacity = working, {}
    for tier in machine.select(TierKind.DRAM):
        taken = min(left, tier.capacity_bytes)
        capacity[tier.name] = tier.capacity_bytes - taken
        left -= taken
    together = None if machine.host_bytes is None else max(0, machine.host_bytes - working)
    return machine.with_capacity(capacity, together)


def working_bytes(job: Job, machine: Machine) -> int:
    """Return the host memory that ranks compute in: none where a device has memory of its own."""
    return machine.device.count * (job.device_bytes or 0) if machine.device.is_host else 0


def _check_ssd(job: Job, machine: Machine) -> None:
    """Refuse state and weights that the tier `ssd` cannot hold."""
    if job.ssd_bytes:
        ssd = machine.ssd or MachineSsd(capacity_bytes=0)
        ssd.check_bytes(job.ssd_bytes_in(ssd.versions))


def _planning(name: str) -> PlanningPolicy:
    policy = ByRole() if name == "by_role" else get_policy(name)
    if not plans(policy):
        raise ConfigError(
            f"policy {name!r} places tensor by tensor, so there is nothing to plan ahead: choose one that has `decide`"
        )
    return policy  # type: ignore[return-value]


def _plan(name: str, policy: PlanningPolicy, job: Job, machine: Machine) -> PolicyPlan:
    if not machine.has_speeds and getattr(policy, "needs_speeds", True):
        return PolicyPlan(name, {}, {}, None, needs_speeds=True)
    try:
        _check_ssd(job, machine)
        decision = policy.decide(job, machine)
    except TierFullError as error:
        return PolicyPlan(name, {}, {}, None, str(error))
    bytes_on: dict[TensorRole, dict[str, int]] = {}
    reasons = dict(decision.reasons)
    for each in job.classes:
        split: Split = decision.splits[each.role] if each.tier is None else {each.tier: 1.0}
        if each.tier is not None:
            reasons.setdefault(each.role, f"asked for {each.tier}")
        own = bytes_on.setdefault(each.role, {})
        for tier, share in split.items():
            own[tier] = own.get(tier, 0) + round(share * each.nbytes)
    time = predict_step(job, decision.splits, machine) if can_predict(job, machine) else None
    added = None
    if time is not None and job.ssd_bytes:
        added = time.seconds - predict_step(job.without_ssd_moves(), decision.splits, machine).seconds
    return PolicyPlan(name, bytes_on, reasons, time, ssd_seconds=added)
