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
from itertools import chain

from lightning_cxl.config import OnTierFull
from lightning_cxl.errors import SpillWarning
from lightning_cxl.inventory.inventory import Inventory
from lightning_cxl.inventory.tensors import (
    PlannedRecord,
    records_of,
    slot_bytes,
    with_slots,
)
from lightning_cxl.machine.machine import MachineSsd
from lightning_cxl.ssd_options import SSD
from lightning_cxl.units import format_bytes

MEMORY_LEFT_FREE = 0.15
"""Part of memory, for what no inventory lists: temporaries of torch, gaps in the C library's heap. More state on drives
costs less than a run that the kernel kills."""


NO_ROOM = "does not fit in memory"
"""The source of a request for the tier `ssd` that no decorator or rule makes."""


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
    there = inventory.ssd_records
    room = ssd.capacity_bytes - sum(record.stored_bytes(ssd) for record in there)
    num_devices = inventory.workload.mesh.num_devices
    without_slots = needed - slot_bytes(there, ssd.num_drives, num_devices)
    enough = memory_bytes * (1 - left_free)
    best: Sequence[PlannedRecord] = []
    for choices in _choices(inventory):
        before = best
        for more in choices:
            chosen = [*before, *more]
            if sum(record.stored_bytes(ssd) for record in chosen) > room:
                continue
            slots = slot_bytes([*there, *chosen], ssd.num_drives, num_devices)
            in_memory = sum(record.tensor_bytes * inventory.copies_of(record.tensors[0].role) for record in chosen)
            left = without_slots - in_memory + slots
            if left < needed:
                best, needed = chosen, left
            if left <= enough:
                return best
        if needed <= memory_bytes:
            return best
    return best


def _choices(inventory: Inventory) -> list[Iterator[Sequence[PlannedRecord]]]:
    """Return what nobody asks a tier for: state, weights, inputs, each as lists that grow from choice to choice."""
    parameters, taken = {*inventory.asked.names.values()}, {record.name for record in inventory.ssd_records}
    order = {name: index for index, name in enumerate(dict.fromkeys(inventory.record_of.values()))}
    free = [record for record in records_of(inventory.tensors, inventory.record_of) if record.tier is None]
    state = [record for record in free if record.is_state and record.name in order and record.name not in taken]
    units = sorted((r for r in state if r.name not in parameters), key=lambda record: order[record.name])
    largest = max((record.nbytes for record in units), default=0)
    others = sorted((r for r in state if r.name in parameters), key=lambda r: (r.nbytes > largest, -r.nbytes))
    weights = [record for record in free if record.is_weights and record.tensors[0].may_leave]
    frozen, updated = ([r for r in weights if r.is_updated is wanted] for wanted in (False, True))
    inputs = [record for record in free if record.is_inputs and record.nbytes]
    return [
        chain(_evenly(units), ([*units, *others[:count]] for count in range(1, len(others) + 1))),
        chain(_evenly(frozen), ([*frozen, *chosen] for chosen in _evenly(updated))),
        (inputs[:count] for count in range(1, len(inputs) + 1)),
    ]


def _evenly(records: Sequence[PlannedRecord]) -> Iterator[Sequence[PlannedRecord]]:
    """Yield one record, two, ..., all of them, each time evenly spread over their order."""
    for count in range(1, len(records) + 1):
        yield [records[index] for index in evenly_spread(count, len(records))]


def _placed(
    inventory: Inventory, records: Sequence[PlannedRecord], tier: str | None, source: str, num_drives: int
) -> Inventory:
    """Return the inventory with all of some records on a tier, and slots for what is on `ssd` now."""
    moved = {id(each) for record in records for each in record.tensors}
    tensors = [each._replace(tier=tier, source=source) if id(each) in moved else each for each in inventory.tensors]
    num_devices = inventory.workload.mesh.num_devices
    return replace(inventory, tensors=with_slots(tensors, inventory.record_of, num_drives, num_devices))
