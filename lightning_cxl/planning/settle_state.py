"""`settle_state`: which state and weights lie on the tier `ssd`, settled in the inventory before any policy decides.

State that decorators and rules ask for is there already. Where memory cannot hold the rest, more state goes there: that
of as many whole units as needed, evenly spread over their order, so that reading and writing it hides behind the units
whose state is in memory; then that of parameters outside of units, the largest first, but those that are larger than
the largest unit last of all, because each of the slots in memory must hold the largest. Where that is not enough,
weights of streamed units go, evenly spread again: they are read twice in every micro-batch. Those that no step writes
go first. The last are inputs of units, where their sizes are known: those of the first units of a forward, which wait
longest. State that is asked for on another tier stays there. All later readers of the inventory see the same: policies,
the check whether a run fits, `plan`, and the run.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_cxl.config import OnTierFull
from lightning_cxl.errors import SpillWarning
from lightning_cxl.inventory.inventory import Inventory
from lightning_cxl.inventory.tensors import (
    HostTensor,
    PlannedRecord,
    group_state,
    input_records,
    slot_bytes,
    weight_records,
    with_slots,
)
from lightning_cxl.machine.machine import MachineSsd
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.ssd_options import SSD
from lightning_cxl.units import format_bytes

MEMORY_LEFT_FREE = 0.15
"""Part of memory, for what no inventory lists: temporaries of torch, gaps in the C library's heap. More state on drives
costs less than a run that the kernel kills."""


NO_ROOM = "does not fit in memory"
"""The source of a request for the tier `ssd` that no decorator or rule makes."""


class _Movable(NamedTuple):
    units: Sequence[PlannedRecord]  # in the order of the model
    others: Sequence[PlannedRecord]  # the largest first
    weights: Sequence[PlannedRecord]  # in the order of the model
    inputs: Sequence[PlannedRecord]  # in the order of the forward


def settle_state(
    inventory: Inventory,
    memory_bytes: int,
    ssd: MachineSsd,
    on_tier_full: OnTierFull,
    left_free: float = MEMORY_LEFT_FREE,
) -> Inventory:
    """Return the inventory with state and weights on the tier `ssd` as they will be in the run.

    Args:
        on_tier_full: where more is asked for than the tier holds, the last records stay in memory, with a warning; or
            that is refused.
        left_free: fraction of memory that stays free where state goes to drives because memory cannot hold it.
    """
    if on_tier_full == "error":
        check_on_ssd(inventory, ssd)
    else:
        inventory = _as_ssd_can_hold(inventory, ssd)
    chosen = _without_room(inventory, memory_bytes, ssd, left_free)
    return _placed(inventory, chosen, SSD, NO_ROOM, ssd.num_drives) if chosen else inventory


def check_on_ssd(inventory: Inventory, ssd: MachineSsd) -> None:
    """Refuse an inventory whose records the tier `ssd` cannot hold."""
    ssd.check_bytes(sum(record.stored_bytes(ssd) for record in inventory.ssd_records))


def memory_bytes_of(inventory: Inventory) -> int:
    """Return the bytes of memory that an inventory takes, what lies on the tier `ssd` left out."""
    return sum(each.nbytes * inventory.copies_of(each.role) for each in inventory.tensors if each.tier != SSD)


def evenly_spread(count: int, of: int) -> list[int]:
    """Return `count` different numbers from 0 to ``of - 1`` at distances that differ by at most one, in order."""
    return [(2 * index + 1) * of // (2 * count) for index in range(count)]


def _as_ssd_can_hold(inventory: Inventory, ssd: MachineSsd) -> Inventory:
    left, refused = ssd.capacity_bytes, []
    for record in inventory.ssd_records:
        if record.stored_bytes(ssd) > left:
            refused.append(record)
        else:
            left -= record.stored_bytes(ssd)
    if not refused:
        return inventory
    warnings.warn(
        f"{_what(refused)} of {len(refused)} of {len(inventory.ssd_records)} records stays in memory "
        f"({format_bytes(sum(record.nbytes for record in refused))}): tier `ssd` has "
        f"{format_bytes(ssd.capacity_bytes)}. Raise its budget, or set on_tier_full='error' to refuse instead.",
        SpillWarning,
        stacklevel=2,
    )
    return _placed(inventory, refused, None, "tier ssd is full", ssd.num_drives)


def _what(records: Sequence[PlannedRecord]) -> str:
    found = {
        "weights" if record.is_weights else "activations" if record.is_inputs else "optimizer state"
        for record in records
    }
    return " and ".join(sorted(found))


def _without_room(
    inventory: Inventory, memory_bytes: int, ssd: MachineSsd, left_free: float
) -> Sequence[PlannedRecord]:
    """Return the records that go to the tier `ssd` so that the others fit; where none do, those that leave least."""
    needed = memory_bytes_of(inventory)
    if needed <= memory_bytes:
        return []
    there, movable = inventory.ssd_records, _movable(inventory)
    room = ssd.capacity_bytes - sum(record.stored_bytes(ssd) for record in there)
    num_devices = inventory.workload.mesh.num_devices
    without_slots = needed - slot_bytes(there, ssd.num_drives, num_devices)
    enough = memory_bytes * (1 - left_free)
    best: Sequence[PlannedRecord] = []
    for choices in (_choices_of_state(movable), _choices_of_weights(movable), _choices_of_inputs(movable)):
        before = best
        for more in choices:
            chosen = [*before, *more]
            if sum(record.stored_bytes(ssd) for record in chosen) > room:
                continue
            slots = slot_bytes([*there, *chosen], ssd.num_drives, num_devices)
            left = without_slots - sum(_bytes_in_memory(inventory, record) for record in chosen) + slots
            if left < needed:
                best, needed = chosen, left
            if left <= enough:
                return best
        if needed <= memory_bytes:
            return best
    return best


def _movable(inventory: Inventory) -> _Movable:
    """Return what nobody asks a tier for, of records of which nothing lies on the tier `ssd` yet."""
    taken = {record.name for record in inventory.ssd_records}
    parameters = {*inventory.asked.names.values()}
    order = {name: index for index, name in enumerate(dict.fromkeys(inventory.record_of.values()))}
    free = group_state(inventory.tensors, inventory.record_of, lambda each: each.tier is None)
    found = [record for record in free if record.name in order and record.name not in taken]
    units = [record for record in found if record.name not in parameters]
    others = [record for record in found if record.name in parameters]
    weights = weight_records(inventory.tensors, lambda each: each.tier is None and inventory.may_leave_memory(each))
    inputs = input_records(inventory.tensors, lambda each: each.tier is None and each.nbytes > 0)
    units.sort(key=lambda record: order[record.name])
    return _Movable(units, sorted(others, key=lambda record: -record.nbytes), weights, inputs)


def _choices_of_state(movable: _Movable) -> Iterator[Sequence[PlannedRecord]]:
    """Yield state that could go to the tier `ssd`, more and more of it; what makes the slots larger comes last."""
    units, others = movable.units, movable.others
    yield from _more_and_more(units)
    largest = max((record.nbytes for record in units), default=0)
    in_turn = [r for r in others if r.nbytes <= largest] + [r for r in others if r.nbytes > largest]
    for count in range(1, len(others) + 1):
        yield [*units, *in_turn[:count]]


def _choices_of_weights(movable: _Movable) -> Iterator[Sequence[PlannedRecord]]:
    """Yield weights that could go, more and more of them; those that steps write come last."""
    frozen = [record for record in movable.weights if not record.is_updated]
    yield from _more_and_more(frozen)
    for chosen in _more_and_more([record for record in movable.weights if record.is_updated]):
        yield [*frozen, *chosen]


def _choices_of_inputs(movable: _Movable) -> Iterator[Sequence[PlannedRecord]]:
    """Yield inputs that could go, more and more of them: those of the first units."""
    for count in range(1, len(movable.inputs) + 1):
        yield movable.inputs[:count]


def _bytes_in_memory(inventory: Inventory, record: PlannedRecord) -> int:
    """Return what the tensors of a record would take in memory."""
    return record.tensor_bytes * inventory.copies_of(record.tensors[0].role)


def _more_and_more(records: Sequence[PlannedRecord]) -> Iterator[Sequence[PlannedRecord]]:
    for count in range(1, len(records) + 1):
        yield [records[index] for index in evenly_spread(count, len(records))]


def _placed(
    inventory: Inventory, records: Sequence[PlannedRecord], tier: str | None, source: str, num_drives: int
) -> Inventory:
    """Return the inventory with all of some records on a tier, and slots for what is on `ssd` now."""
    state = {id(each.parameter) for record in records if record.is_state for each in record.tensors}
    inputs = {record.owner for record in records if record.is_inputs}
    pieces = {id(each.parameter) for record in records if record.is_weights for each in record.tensors}
    inventory.asked.place_state((p for p in inventory.model.parameters() if id(p) in state), tier, source)
    groups = [
        group for unit in (*inventory.streamed, *inventory.gathered) for group in unit.groups if id(group[0]) in pieces
    ]
    inventory.asked.place_weights((parameter for group in groups for parameter in group), tier, source)

    inventory.asked.place_inputs(inputs, tier, source)

    def is_moved(each: HostTensor) -> bool:
        if each.role is TensorRole.ACTIVATIONS:
            return each.unit in inputs
        if each.role is TensorRole.COMPUTE_WEIGHTS:
            return bool(each.unit) and id(each.parameter) in pieces
        return each.in_state and id(each.parameter) in state

    tensors = (each._replace(tier=tier) if is_moved(each) else each for each in inventory.tensors)
    num_devices = inventory.workload.mesh.num_devices
    return replace(inventory, tensors=with_slots(tensors, inventory.record_of, num_drives, num_devices))
