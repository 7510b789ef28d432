"""`decide`: where everything of a run goes, before any of it is allocated. See [Note: One plan].

A policy sees the tensors of the plan as one job and splits every role over tiers; `Placer` answers for each tensor from
that. A run that does not fit is refused here.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from lightning_cxl.config import SSD, OffloadConfig, OnTierFull
from lightning_cxl.errors import ConfigError, SpillWarning, TierFullError, warn
from lightning_cxl.inventory.plan import Plan
from lightning_cxl.inventory.tensors import PlannedRecord, gradients_at_once, records_of, slot_bytes, with_slots
from lightning_cxl.machine.speeds import MachineSsd, check_split, machine_of, machine_without_speeds, with_new_tiers
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.host_memory import HostMemory, anonymous_bytes, is_ordinary
from lightning_cxl.memory.placement import Placement, Placer, TensorRole
from lightning_cxl.planning.job import MemoryClass, model_job
from lightning_cxl.planning.policies import Decision, PlanningPolicy, get_policy
from lightning_cxl.shards import local
from lightning_cxl.streaming.unit_weights import tensors_by_parameter
from lightning_cxl.text import format_bytes

# `settle_state`: which state and weights lie on the tier `ssd`, settled in the plan before any policy decides.
#
# State that decorators and rules ask for is there already. Where memory cannot hold the rest, more state goes there:
# that of as many whole units as needed, evenly spread over their order, so that reading and writing it hides behind the
# units whose state is in memory; then that of parameters outside of units, the largest first, but those that are larger
# than the largest unit last of all, because each of the slots in memory must hold the largest. Where that is not
# enough, weights of streamed units go, so late because they are read twice in every micro-batch: evenly spread again,
# those that no step writes first. The last are inputs of units, where their sizes are known: those of the first units
# of a forward, which wait longest.

MEMORY_LEFT_FREE = 0.15  # part of memory, for what no plan lists: temporaries of torch, gaps in the C library's heap
NO_ROOM = "does not fit in memory"  # the source of a request for the tier `ssd` that no decorator or rule makes


def settle_state(
    plan: Plan, memory_bytes: int, ssd: MachineSsd, on_tier_full: OnTierFull, left_free: float = MEMORY_LEFT_FREE
) -> Plan:
    """Return the plan with state and weights on the tier `ssd` as they will be in the run."""
    left, refused = ssd.capacity_bytes, []
    if on_tier_full == "error":
        check_on_ssd(plan, ssd)
    else:
        for record in plan.ssd_records:
            if record.stored_bytes(ssd) > left:
                refused.append(record)
            else:
                left -= record.stored_bytes(ssd)
    if refused:
        kinds = {"weights" if r.is_weights else "activations" if r.is_inputs else "optimizer state" for r in refused}
        warn(
            f"{' and '.join(sorted(kinds))} of {len(refused)} of {len(plan.ssd_records)} records stays in memory "
            f"({format_bytes(sum(record.nbytes for record in refused))}): tier `ssd` has "
            f"{format_bytes(ssd.capacity_bytes)}. Raise its budget, or set on_tier_full='error' to refuse instead.",
            SpillWarning,
        )
        plan = _placed(plan, refused, None, "tier ssd is full", ssd.num_drives)
    chosen = _without_room(plan, memory_bytes, ssd, left_free)
    return _placed(plan, chosen, SSD, NO_ROOM, ssd.num_drives) if chosen else plan


def settle_gradients(plan: Plan, memory_bytes: int) -> Plan:
    """Return the plan with gradients of a few units at a time if updates run behind the backward and all have no room.

    The backward then waits for updates where it is faster ([Note: Overlapped updates]). The same where weights lie on
    SSD: memory is to have parts of the model only.
    """
    if plan.overlap != "both" or plan.workload.num_arrivals > 1:
        return plan
    on_ssd = any(each.tier == SSD and each.role is TensorRole.COMPUTE_WEIGHTS for each in plan.tensors)
    if memory_bytes_of(plan) <= memory_bytes and not on_ssd:
        return plan
    return replace(plan, tensors=tuple(gradients_at_once(plan.tensors)), overlap="backward")


def check_on_ssd(plan: Plan, ssd: MachineSsd) -> None:
    ssd.check_bytes(sum(record.stored_bytes(ssd) for record in plan.ssd_records))


def memory_bytes_of(plan: Plan) -> int:
    """Return the bytes of memory that a plan takes, what lies on the tier `ssd` left out."""
    return sum(each.nbytes * plan.copies_of(each.role) for each in plan.tensors if each.tier != SSD)


def _without_room(plan: Plan, memory_bytes: int, ssd: MachineSsd, left_free: float) -> Sequence[PlannedRecord]:
    """Return the records that go to the tier `ssd` so that the others fit; where none do, those that leave least."""
    needed = memory_bytes_of(plan)
    if needed <= memory_bytes:
        return []
    there = plan.ssd_records
    room = ssd.capacity_bytes - sum(record.stored_bytes(ssd) for record in there)
    num_devices = plan.workload.mesh.num_devices
    without_slots = needed - slot_bytes(there, ssd.num_drives, num_devices)
    enough = memory_bytes * (1 - left_free)
    best: Sequence[PlannedRecord] = []
    for choices in _choices(plan):
        before = best
        for more in choices:
            chosen = [*before, *more]
            if sum(record.stored_bytes(ssd) for record in chosen) > room:
                continue
            slots = slot_bytes([*there, *chosen], ssd.num_drives, num_devices)
            in_memory = sum(record.tensor_bytes * plan.copies_of(record.tensors[0].role) for record in chosen)
            left = without_slots - in_memory + slots
            if left < needed:
                best, needed = chosen, left
            if left <= enough:
                return best
        if needed <= memory_bytes:
            return best
    return best


def _choices(plan: Plan) -> list[Iterator[Sequence[PlannedRecord]]]:
    """Return what no rule places: state, weights, inputs, each as lists that grow from choice to choice."""
    parameters, taken = {*plan.asked.names.values()}, {record.name for record in plan.ssd_records}
    order = {name: index for index, name in enumerate(dict.fromkeys(plan.record_of.values()))}
    free = [record for record in records_of(plan.tensors, plan.record_of) if record.tier is None]
    state = [record for record in free if record.is_state and record.name in order and record.name not in taken]
    units = sorted((r for r in state if r.name not in parameters), key=lambda record: order[record.name])
    largest = max((record.nbytes for record in units), default=0)
    others = sorted((r for r in state if r.name in parameters), key=lambda r: (r.nbytes > largest, -r.nbytes))
    weights = [record for record in free if record.is_weights and record.tensors[0].may_be_on_ssd]
    frozen, updated = ([r for r in weights if r.is_updated is wanted] for wanted in (False, True))
    inputs = [record for record in free if record.is_inputs and record.nbytes]
    return [
        chain(_evenly(units), ([*units, *others[:count]] for count in range(1, len(others) + 1))),
        chain(_evenly(frozen), ([*frozen, *chosen] for chosen in _evenly(updated))),
        (inputs[:count] for count in range(1, len(inputs) + 1)),
    ]


def _evenly(records: Sequence[PlannedRecord]) -> Iterator[Sequence[PlannedRecord]]:
    """Yield one record, two, ..., all of them, each time at distances in their order that differ by at most one."""
    for count in range(1, len(records) + 1):
        yield [records[(2 * index + 1) * len(records) // (2 * count)] for index in range(count)]


def _placed(plan: Plan, records: Sequence[PlannedRecord], tier: str | None, source: str, num_drives: int) -> Plan:
    """Return the plan with all of some records on a tier, and slots for what is on `ssd` now."""
    moved = {id(each) for record in records for each in record.tensors}
    tensors = [each._replace(tier=tier, source=source) if id(each) in moved else each for each in plan.tensors]
    num_devices = plan.workload.mesh.num_devices
    return replace(plan, tensors=with_slots(tensors, plan.record_of, num_drives, num_devices))


log = logging.getLogger(__name__)

_SLACK_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes of host memory that a run may fill: of every tier, and together, as tiers may share memory or a limit."""

    tiers: Mapping[str, int]
    together: int

    @property
    def usable_bytes(self) -> int:
        return min(sum(map(usable, self.tiers.values())), usable(self.together))


def usable(nbytes: int) -> int:
    """Return what a plan may fill of a tier: pools have unused ends of slabs, and splits end in whole stripes."""
    return nbytes - min(nbytes // 8, _SLACK_BYTES)


def free_for(model: nn.Module, memory: HostMemory) -> FreeMemory:
    """Return what a run of a model may fill: what is free within budgets, and what the model's weights take already."""
    # weights move when a run begins, so their present bytes count, on their tier or in ordinary memory
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


def check_fits(
    requests: Sequence[tuple[TensorRole, int, Placement]],
    free: Mapping[str, int],
    on_tier_full: OnTierFull,
    *,
    most: float = math.inf,
) -> None:
    """Refuse tensors that the tiers of memory cannot hold, before anything is allocated; see also `check_on_ssd`."""
    left, together = dict(free), most
    requests = [each for each in requests if SSD not in each[2].tiers]
    for role, nbytes, placement in requests:
        together -= nbytes
        sizes = None if together < 0 else _where_it_fits(nbytes, placement, left, on_tier_full)
        if sizes is None:
            allowed = placement.tiers if on_tier_full == "spill" else tuple(placement.split())
            needed = sum(size for other, size, _ in requests if other is role)
            have = ", ".join(f"`{name}` {format_bytes(size)}" for name, size in free.items())
            total = format_bytes(sum(size for _, size, _ in requests))
            raise TierFullError(
                f"cannot place {role.value} ({format_bytes(needed)} of {total} to place now) on tier "
                f"{' and '.join(f'`{name}`' for name in placement.split())}"
                f"{' or any other' if len(allowed) > len(placement.split()) else ''}: free before that: {have}"
                f"{f', {format_bytes(most)} together' if together < 0 else ''}. Raise "
                "the tier's budget in `tiers`, free memory, use a smaller model, or see what there is with "
                "`python -m lightning_cxl env`."
            )
        for tier, size in sizes.items():
            left[tier] -= size


def _where_it_fits(
    nbytes: int, placement: Placement, left: Mapping[str, int], on_tier_full: OnTierFull
) -> dict[str, int] | None:
    """Return what each tier gets, as `HostMemory` divides a tensor; None when it fits nowhere."""
    sizes = placement.split_bytes(nbytes)
    over = sum(max(0, size - left.get(tier, 0)) for tier, size in sizes.items())
    if not over:
        return sizes
    if on_tier_full == "error":
        return None
    if sum(left.get(tier, 0) for tier in sizes) < nbytes:
        spilled = next((tier for tier in placement.tiers if tier not in sizes and left.get(tier, 0) >= nbytes), None)
        return None if spilled is None else {spilled: nbytes}
    for tier, size in sizes.items():  # the others of the split take what one of them cannot
        room = left.get(tier, 0)
        more = min(over, max(0, room - size))
        sizes[tier] = min(size, room) + more
        over -= more
    return sizes


class RunPolicy:
    """The policy of a run, chosen before there is a model; ours by default, where tiers and their speeds are known."""

    def __init__(
        self, config: OffloadConfig, topology: Topology, device: torch.device, wanted: PlanningPolicy | None
    ) -> None:
        self._topology = topology
        self.cpu_computes = device.type == "cpu"
        several = sum(not tier.emulated for tier in topology.tiers) > 1
        named = config.policy if wanted is None else type(wanted).__name__
        by_role = wanted is None and (named == "by_role" or (named == "auto" and not several))
        machine = None
        if config.machine is not None or not by_role:  # no need to look up speeds that nobody asks for
            machine = machine_of(topology, device, file=config.machine)
        if not by_role and wanted is None and named == "auto" and machine is None:
            by_role = True
            log.info("tiers are chosen by role: speeds are not known, see `python -m lightning_cxl calibrate`")
        if by_role and config.machine is not None:
            warn(
                f"`machine={config.machine!r}` has no effect: {'with it' if several else 'there is one kind of memory'}"
                f"{'' if several else ', where'} nothing is planned by speed. Choose a policy such as 'bandwidth'."
            )
        self.name = "by role" if by_role else "bandwidth" if wanted is None and named == "auto" else named
        self._planning = None if by_role else get_policy(self.name) if wanted is None else wanted
        if self._planning is not None and machine is None:
            if getattr(self._planning, "needs_speeds", True):
                raise ConfigError(
                    f"policy {self.name!r} needs the speeds of all tiers ({', '.join(topology.names)}), and they are "
                    "not known. Run `python -m lightning_cxl calibrate`, or give a file with `machine=`."
                )
            machine = machine_without_speeds(topology, device)
        # one process drives one of its devices
        self._machine = machine and replace(machine, device=replace(machine.device, count=1))

    def decide(self, plan: Plan, free: FreeMemory) -> Decision:
        """Return what the policy decides about a run; nothing where every role has its default tier."""
        if self._planning is None or self._machine is None:
            return Decision({}, {})
        job = model_job(type(plan.model).__name__, plan)
        if TensorRole.ACTIVATIONS not in job.free_classes():
            # how large they are may not be known yet; where they go is decided now
            unknown = MemoryClass(role=TensorRole.ACTIVATIONS, nbytes=0)
            job = replace(job, classes=(*job.classes, unknown))
        # since the policy was chosen, rules and decorators may have asked for one tier more
        machine = with_new_tiers(self._machine, self._topology)
        limits = {tier.name: min(usable(free.tiers[tier.name]), tier.capacity_bytes) for tier in machine.tiers}
        most = free.together if machine.host_bytes is None else min(free.together, machine.host_bytes)
        machine = machine.with_capacity(limits, most)
        decision = self._planning.decide(job, machine)
        missing = [role.value for role in job.free_classes() if role not in decision.splits]
        if missing:
            raise ConfigError(
                f"policy {self.name!r} decides nothing about {', '.join(missing)}: `decide` must place all"
            )
        try:
            for name in (name for split in decision.splits.values() for name in split):
                self._topology.tier(name)  # makes the tier `cxl` where the policy names it and there is none
            machine = with_new_tiers(machine, self._topology)
            for split in decision.splits.values():
                check_split(split, machine)
        except ValueError as error:
            raise ConfigError(f"policy {self.name!r}: {error}") from error
        return decision


def decide(
    plan: Plan, policy: RunPolicy, memory: HostMemory, on_tier_full: OnTierFull, ssd: MachineSsd | None = None
) -> Plan:
    """Return the plan with a placer that answers for each of its tensors."""
    free = free_for(plan.model, memory)
    decision, on_cpu = policy.decide(plan, free), policy.cpu_computes
    splits, reasons = decision.splits, decision.reasons
    placer = Placer(memory.topology, memory.free_bytes, cpu_computes=on_cpu, splits=splits, reasons=reasons)
    plan = replace(plan, placer=placer, pins=memory.pins)
    requests = [(each.role, each.nbytes, plan.of(each)) for each in plan.tensors]
    if set(memory.topology.names) - set(free.tiers):  # the policy has asked for one tier more
        free = free_for(plan.model, memory)
    check_fits(requests, free.tiers, on_tier_full, most=free.together)
    if ssd is not None:
        check_on_ssd(plan, ssd)
    return plan
