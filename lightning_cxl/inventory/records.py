"""`PlannedRecord`: state, weights or inputs that are read from and written to the tier `ssd` as one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from lightning_cxl.inventory.tensors import HostTensor, StreamedUnit, units_by_parameter
from lightning_cxl.optim.state_records import taken_nbytes
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.ssd_options import SSD
from lightning_cxl.storage.drive import BLOCK_BYTES
from lightning_cxl.streaming.inputs_on_ssd import NUM_INPUT_SLOTS
from lightning_cxl.streaming.units import NamedUnits

NUM_UPDATE_SLOTS = 3
"""What updates of units visit in memory at a time: one is read, one is updated, one is written."""
NUM_HOP_SLOTS = 2
"""Weights of units in memory at a time on their way to the device: one is read, one is copied."""
SLOTS_OWNER = "slots for the tier ssd"
"""Who the memory of these slots is placed for, instead of a parameter or unit."""
RECORD_ALIGNMENT = BLOCK_BYTES
"""Of where a record begins and ends, in bytes: what direct access to a drive wants."""


@dataclass(frozen=True, eq=False)
class PlannedRecord:
    """The state of one unit, or of one parameter outside of units; weights of one unit that streams; or its inputs.

    Args:
        name: of the record.
        owner: the unit or parameter. What belongs to one owner is updated together.
        tensors: in the order of the inventory.
    """

    name: str
    owner: str
    tensors: tuple[HostTensor, ...]

    @property
    def is_weights(self) -> bool:
        """Whether it has weights, and no state."""
        return self.tensors[0].role is TensorRole.COMPUTE_WEIGHTS

    @property
    def is_inputs(self) -> bool:
        """Whether it stands for the inputs of a unit in one micro-batch."""
        return self.tensors[0].role is TensorRole.ACTIVATIONS

    @property
    def is_state(self) -> bool:
        """Whether it has optimizer state."""
        return not self.is_weights and not self.is_inputs

    @property
    def is_updated(self) -> bool:
        """Whether steps write it: weights that are frozen are only read."""
        return any(each.is_updated for each in self.tensors)

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(each.nbytes for each in self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the record, with the gaps that alignment leaves, also between 8-bit numbers and their scales."""
        if self.is_inputs and not self.tensors[0].nbytes:
            return 0
        return round_up(sum(taken_nbytes(each.nbytes) + taken_nbytes(1) for each in self.tensors), RECORD_ALIGNMENT)

    def nbytes_on(self, num_drives: int) -> int:
        """Return the bytes of the record where it is cut over several drives; a slot for it has as many."""
        return round_up(self.nbytes, RECORD_ALIGNMENT * num_drives)


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
    return tuple(PlannedRecord(name, name, tuple(group)) for name, group in groups.items())


def weight_records(tensors: Iterable[HostTensor], wanted: Callable[[HostTensor], bool]) -> tuple[PlannedRecord, ...]:
    """Return the weights of streamed units that are wanted, in records: each piece is one.

    Args:
        tensors: of the inventory.
        wanted: is asked about every piece.
    """
    records = []
    num_pieces: dict[str, int] = {}
    for each in tensors:
        if each.role is TensorRole.COMPUTE_WEIGHTS and each.unit:
            name = f"{each.unit} weights" if each.is_updated else f"{each.unit} frozen weights"
            index = num_pieces[name] = num_pieces.get(name, 0) + 1
            if wanted(each):
                records.append(PlannedRecord(name if index == 1 else f"{name} {index}", each.unit, (each,)))
    return tuple(records)


def input_records(tensors: Iterable[HostTensor], wanted: Callable[[HostTensor], bool]) -> tuple[PlannedRecord, ...]:
    """Return the inputs of units that are wanted, in the order of units; their sizes may be 0: not known.

    Args:
        tensors: of the inventory.
        wanted: is asked about the inputs of every unit.
    """
    inputs = [each for each in tensors if each.role is TensorRole.ACTIVATIONS and wanted(each)]
    return tuple(PlannedRecord(f"{each.unit} inputs", each.unit, (each,)) for each in inputs)


def records_on_ssd(tensors: Sequence[HostTensor], record_of: Mapping[int, str]) -> tuple[PlannedRecord, ...]:
    """Return what lies on the tier `ssd`: weights, then inputs, then state.

    Args:
        tensors: of the inventory.
        record_of: see `record_names`.
    """
    return (
        *weight_records(tensors, lambda each: each.tier == SSD),
        *input_records(tensors, lambda each: each.tier == SSD),
        *group_state(tensors, record_of, lambda each: each.tier == SSD),
    )


def with_slots(
    tensors: Iterable[HostTensor], record_of: Mapping[int, str], num_drives: int = 1, num_devices: int = 1
) -> tuple[HostTensor, ...]:
    """Return the tensors with the host memory that records of the tier `ssd` visit, as much as they need now.

    Args:
        tensors: of the inventory.
        record_of: see `record_names`.
        num_drives: over which each record is cut.
        num_devices: of the machine; each has slots of its own for inputs.
    """
    others = tuple(each for each in tensors if each.owner != SLOTS_OWNER)
    records = records_on_ssd(others, record_of)
    nbytes = slot_bytes(records, num_drives, num_devices)
    return (*others, HostTensor(None, TensorRole.STAGING, nbytes, SLOTS_OWNER)) if nbytes else others


def slot_bytes(records: Sequence[PlannedRecord], num_drives: int = 1, num_devices: int = 1) -> int:
    """Return the bytes of all slots that these records visit, each cut over some drives; see `with_slots`."""
    once = update_slot_bytes(records, num_drives) + hop_slot_bytes(records, num_drives)
    return once + num_devices * input_slot_bytes(records, num_drives)


def update_slot_bytes(records: Iterable[PlannedRecord], num_drives: int = 1) -> int:
    """Return the bytes of the slots of updates; each holds the largest of what is updated together."""
    of_owner: dict[str, int] = {}
    for record in records:
        if record.is_updated:
            of_owner[record.owner] = of_owner.get(record.owner, 0) + record.nbytes_on(num_drives)
    return NUM_UPDATE_SLOTS * max(of_owner.values(), default=0)


def hop_slot_bytes(records: Iterable[PlannedRecord], num_drives: int = 1) -> int:
    """Return the bytes of the slots of weights on their way to the device; each holds the largest of them."""
    return NUM_HOP_SLOTS * max((record.nbytes_on(num_drives) for record in records if record.is_weights), default=0)


def input_slot_bytes(records: Iterable[PlannedRecord], num_drives: int = 1) -> int:
    """Return the bytes of the slots of inputs of units; each holds the inputs of the largest of them."""
    return NUM_INPUT_SLOTS * max((record.nbytes_on(num_drives) for record in records if record.is_inputs), default=0)
