"""`PlannedRecord`: optimizer state that is read from and written to the tier `ssd` as one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from lightning_cxl.inventory.tensors import HostTensor, StreamedUnit, units_by_parameter
from lightning_cxl.optim.state_records import taken_nbytes
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.ssd_options import SSD
from lightning_cxl.storage.drive import BLOCK_BYTES
from lightning_cxl.streaming.units import NamedUnits

NUM_STATE_SLOTS = 3
"""Records in memory at a time: one is read, one is updated, one is written."""
SLOTS_OWNER = "slots for state on ssd"
"""Who the memory of these slots is placed for, instead of a parameter or unit."""
RECORD_ALIGNMENT = BLOCK_BYTES
"""Of where a record begins and ends, in bytes: what direct access to a drive wants."""


class PlannedRecord(NamedTuple):
    """The state of one unit, or of one parameter outside of units.

    Args:
        name: of the unit or parameter.
        tensors: in the order of the inventory.
    """

    name: str
    tensors: tuple[HostTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the record, with the gaps that alignment leaves, also between 8-bit numbers and their scales."""
        return round_up(sum(taken_nbytes(each.nbytes) + taken_nbytes(1) for each in self.tensors), RECORD_ALIGNMENT)


def round_up(nbytes: int, alignment: int) -> int:
    """Return the next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def record_names(model: nn.Module, blocks: NamedUnits, streamed: Sequence[StreamedUnit]) -> dict[int, str]:
    """Return the name of the record that the state of each parameter belongs to, by the parameter's id.

    What streams belongs to its unit. So does what does not stream, if nothing of its block streams: then all of the
    block is updated together. Any other parameter is a record of its own.

    Args:
        model: all of it.
        blocks: its repeated blocks, whether their weights stream or not.
        streamed: the units whose weights stream.
    """
    found = units_by_parameter(streamed)
    streams = {unit.name for unit in streamed}
    for name, block in blocks:
        for parameter in block.parameters() if name not in streams else ():
            found.setdefault(id(parameter), name)
    for name, parameter in model.named_parameters():
        found.setdefault(id(parameter), name)
    return found


def group_state(
    tensors: Iterable[HostTensor], record_of: Mapping[int, str], wanted: Callable[[HostTensor], bool]
) -> tuple[PlannedRecord, ...]:
    """Return the state among the tensors that is wanted, in records.

    Args:
        tensors: of the inventory.
        record_of: see `record_names`.
        wanted: is asked about every tensor of `CPUAdam`'s state.
    """
    groups: dict[str, list[HostTensor]] = {}
    for each in tensors:
        if each.in_state and wanted(each):
            # an optimizer may hold what is no parameter of the model
            name = record_of.get(id(each.parameter)) or f"unnamed.{id(each.parameter)}"
            groups.setdefault(name, []).append(each)
    return tuple(PlannedRecord(name, tuple(group)) for name, group in groups.items())


def with_slots(tensors: Iterable[HostTensor], record_of: Mapping[int, str]) -> tuple[HostTensor, ...]:
    """Return the tensors with the host memory that state on the tier `ssd` visits, as much as it needs now."""
    others = tuple(each for each in tensors if each.owner != SLOTS_OWNER)
    records = group_state(others, record_of, lambda each: each.tier == SSD)
    if not records:
        return others
    return (*others, HostTensor(None, TensorRole.STAGING, slot_bytes(records), SLOTS_OWNER))


def slot_bytes(records: Iterable[PlannedRecord]) -> int:
    """Return the bytes of all slots that these records visit; each holds the largest of them."""
    return NUM_STATE_SLOTS * max((record.nbytes for record in records), default=0)
