"""`PlannedTensor`, a row of the inventory; `PlannedRecord`, rows that are one record on the tier `ssd`; gradients."""

import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_cxl.config import SSD
from lightning_cxl.gradients.offload import MAX_STAGED
from lightning_cxl.gradients.step import MAX_UNITS_IN_FLIGHT
from lightning_cxl.machine.speeds import MachineSsd
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.optim.swapped_state import taken_nbytes
from lightning_cxl.shards import local
from lightning_cxl.storage.drive import BLOCK_BYTES
from lightning_cxl.streaming.on_ssd import NUM_INPUT_SLOTS
from lightning_cxl.streaming.units import NamedUnits

# The work of a step: batch, ranks (`Mesh`), and the habits of the training loop (`Loop`).


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The ranks of one run, one for each device, and how parameters are cut over them.

    A parameter is cut along its first dimension into as many shards as there are ranks that share it, all as long as
    the longest: so does torch's FSDP2.
    """

    num_devices: int = 1
    """Of each machine."""
    num_machines: int = 1
    replicates: bool = False
    """Every machine holds the whole model, cut over its own devices (hybrid sharding, HSDP); else one copy of the model
    is cut over all ranks."""

    @property
    def num_ranks(self) -> int:
        return self.num_devices * self.num_machines

    @property
    def is_sharded(self) -> bool:
        return self.num_ranks > 1

    @property
    def num_shards(self) -> int:
        return self.num_devices if self.replicates else self.num_ranks

    @property
    def num_replicas(self) -> int:
        """How often the whole model is there."""
        return self.num_machines if self.replicates else 1

    def shard_numel(self, parameter: Tensor) -> int:
        """Return the elements of one rank's shard, with what it is padded by."""
        length = parameter.shape[0] if parameter.ndim else 1
        return math.ceil(length / self.num_shards) * parameter.numel() // length if length else 0

    def machine_bytes(self, nbytes: int, parameters: Iterable[Tensor]) -> int:
        """Return what the shards of one machine take of `nbytes` that belong to whole parameters."""
        if not self.is_sharded:
            return nbytes
        found = list(parameters)
        whole = sum(each.numel() for each in found)
        shards = sum(self.num_devices * self.shard_numel(each) for each in found)
        return math.ceil(nbytes * shards / whole) if whole else nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """Facts about the training loop before it starts; the careful answer where a fact is not known."""

    accumulates: bool = False
    """Several micro-batches are added up before a step, at some time of the run."""
    needs_whole_step: str | None = "the training loop is not known"
    """The part of the loop that may skip a step, or read gradients, once the step's closure runs; None if none does."""
    reads_gradients: bool = True
    """Somebody may read gradients between the micro-batches of a step."""
    edits_gradients: bool = True
    """Somebody may write gradients between backward and step, perhaps through ``.data``."""
    writes_unseen: bool = False
    """Somebody may write weights between steps through ``.data``, which leaves no trace."""


Overlap = Literal["none", "backward", "forward", "both"]
"""The phase that hides the update: none, the backward it follows, the next forward, or both of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    batch: int
    """Sequences of one micro-batch on one device."""
    sequence: int
    """Tokens of each."""
    num_micro_batches: int = 1
    """Added up before a step."""
    mixed: bool = False
    """Autocast to bfloat16 over float32 weights."""
    computes_on_host: bool = False
    """The CPU is the device."""
    updates_in_backward: bool = False
    """No part of the loop skips a step or reads gradients, so overlapped updates may run behind the backward."""
    mesh: Mesh = field(default_factory=Mesh)
    """The ranks; each keeps activations of its own."""
    no_sync: bool = False
    """With several ranks: gradients are added up on the devices, and only those of the last micro-batch are reduced."""

    @property
    def num_arrivals(self) -> int:
        """How often gradients come to the host in one step."""
        return 1 if self.no_sync and self.mesh.is_sharded else self.num_micro_batches


GRADIENTS = (TensorRole.COMPUTE_GRADS, TensorRole.MASTER_GRADS)


class PlannedTensor(NamedTuple):
    """A tensor that a run keeps in host memory."""

    parameter: torch.Tensor | None
    """Of the model, whose weights, gradient or state it is; for weights of a unit that lie in one piece of memory, the
    first of them. None for inputs of a unit."""
    role: TensorRole
    nbytes: int
    unit: str = ""
    """The unit that it belongs to, where that streams or where it is the unit's input."""
    tier: str | None = None
    """That a decorator or rule asks for, or `ssd` where memory has no room; None: the policy decides."""
    in_state: bool = False
    """It is state of `CPUAdam`: momentum, variance, or what a split master weight has beyond the bfloat16 weight."""
    is_updated: bool = True
    """Steps write it; of weights, an optimizer has to hold them."""
    may_be_on_ssd: bool = False
    """State, inputs of units, and weights of units that stream, if no other optimizer than `CPUAdam` writes them."""
    source: str = ""
    """Of the request for `tier`, or why the tier that is asked for cannot hold it."""

    @property
    def owner(self) -> torch.Tensor | str:
        return self.unit if self.parameter is None else self.parameter

    @property
    def parameter_nbytes(self) -> int:
        """Bytes of the parameter itself, in its own type; of the shard that this process holds."""
        return 0 if self.parameter is None else local(self.parameter).nbytes


class StreamedUnit(NamedTuple):
    name: str
    module: nn.Module
    groups: list[list[nn.Parameter]]
    """Its parameters that stream, those that the same tier is asked for together. Where there is a tier `ssd`, those
    that no step writes are by themselves."""


def units_by_parameter(streamed: Iterable[StreamedUnit]) -> dict[int, str]:
    return {id(parameter): unit.name for unit in streamed for group in unit.groups for parameter in group}


def grouped(parameters: Iterable[nn.Parameter], key: Callable[[nn.Parameter], Hashable]) -> list[list[nn.Parameter]]:
    groups: dict[Hashable, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(key(parameter), []).append(parameter)
    return list(groups.values())


def offload_groups(tensors: Iterable[PlannedTensor]) -> list[list[PlannedTensor]]:
    """Return the gradients among the tensors in groups as they leave the device, the largest group first."""
    groups: dict[object, list[PlannedTensor]] = {}
    for each in tensors:
        if each.role in GRADIENTS:
            groups.setdefault(each.unit or id(each.parameter), []).append(each)
    return sorted(groups.values(), key=parameter_bytes, reverse=True)


def parameter_bytes(group: Iterable[PlannedTensor]) -> int:
    return sum(each.parameter_nbytes for each in group)


def gradients_at_once(tensors: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    """Return the tensors, of the gradients of units only those that exist at a time when updates run in backward."""
    kept: list[PlannedTensor] = []
    of_unit: dict[str, list[PlannedTensor]] = {}
    for each in tensors:
        (of_unit.setdefault(each.unit, []) if each.unit and each.role in GRADIENTS else kept).append(each)
    largest = heapq.nlargest(
        MAX_UNITS_IN_FLIGHT + 1, of_unit.values(), key=lambda group: sum(each.nbytes for each in group)
    )
    return kept + [each for group in largest for each in group]


def widened_gradients(tensors: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    """Return the largest first gradients of a step that are still there while sums become wider (`GradientOffload`)."""
    wider = [each for each in tensors if each.nbytes > each.parameter_nbytes]
    largest = next(iter(offload_groups(wider)), [])
    return [each._replace(nbytes=each.parameter_nbytes) for each in largest]


def staged_gradients(tensors: Iterable[PlannedTensor], workload: Workload) -> tuple[list[PlannedTensor], int]:
    """Return the gradients that are in staging memory at a time, as `GradientOffload` has it, and bytes of a step.

    All gradients of a step are staged but the first, unless it widens. If the host computes, only those of units that
    stream leave.
    """
    total, landing = 0, []
    for each in tensors:
        if each.role in GRADIENTS and (each.unit or not workload.computes_on_host):
            is_first_kept = each.nbytes == each.parameter_nbytes or workload.num_arrivals > 1
            num_landed = workload.num_arrivals - is_first_kept
            total += num_landed * each.parameter_nbytes
            if num_landed:
                landing.append(each._replace(nbytes=each.parameter_nbytes))
    groups = offload_groups(landing)[:MAX_STAGED]
    return [each._replace(role=TensorRole.STAGING) for group in groups for each in group], total


def of_machine(
    tensors: Iterable[PlannedTensor], streamed: Iterable[StreamedUnit], mesh: Mesh
) -> tuple[PlannedTensor, ...]:
    """Return the tensors as large as all shards of one machine together; inputs of units stay as they are."""
    if not mesh.is_sharded:
        return tuple(tensors)
    pieces: dict[int, list[Tensor]] = {id(group[0]): [*group] for unit in streamed for group in unit.groups}
    parts = []
    for each in tensors:
        if each.parameter is not None:
            whole = [each.parameter]
            if each.role is TensorRole.COMPUTE_WEIGHTS:
                whole = pieces.get(id(each.parameter), whole)
            each = each._replace(nbytes=mesh.machine_bytes(each.nbytes, whole))
        parts.append(each)
    return tuple(parts)


NUM_UPDATE_SLOTS = 3
"""Buffers in memory for updates of units: one is read, one is updated, one is written."""
NUM_WEIGHT_SLOTS = 2
"""Weights of units in memory at a time on their way to the device: one is read, one is copied."""
SLOTS_OWNER = "slots for the tier ssd"
"""Owner of the memory of these slots, in the place of a parameter or unit."""
RECORD_ALIGNMENT = BLOCK_BYTES
"""Of where a record begins and ends, in bytes: what direct access to a drive wants."""


@dataclass(frozen=True, eq=False)
class PlannedRecord:
    """The state of one unit, or of one parameter outside of units; weights of one unit that streams; or its inputs."""

    name: str
    owner: str
    """The unit or parameter. The records of one owner are updated together."""
    tensors: tuple[PlannedTensor, ...]

    @property
    def tier(self) -> str | None:
        return self.tensors[0].tier

    @property
    def is_weights(self) -> bool:
        return self.tensors[0].role is TensorRole.COMPUTE_WEIGHTS

    @property
    def is_inputs(self) -> bool:
        return self.tensors[0].role is TensorRole.ACTIVATIONS

    @property
    def is_state(self) -> bool:
        return not self.is_weights and not self.is_inputs

    @property
    def is_updated(self) -> bool:
        """Whether steps write it: weights that are frozen are only read."""
        return any(each.is_updated for each in self.tensors)

    @cached_property
    def tensor_bytes(self) -> int:
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

    def stored_bytes(self, ssd: MachineSsd) -> int:
        """Return the bytes of the record on the drives, all versions together; only state has several."""
        return (ssd.versions if self.is_state else 1) * self.nbytes_on(ssd.num_drives)


def round_up(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def record_names(model: nn.Module, blocks: NamedUnits, streamed: Sequence[StreamedUnit]) -> dict[int, str]:
    """Return the name of the record that the state of each parameter belongs to, by the parameter's id.

    A parameter that streams belongs to its unit. So does one that does not, if nothing of its block streams: then all
    of the block is updated together. Any other parameter is a record of its own.
    """
    found = units_by_parameter(streamed)
    streams = {unit.name for unit in streamed}
    for name, block in blocks:
        for parameter in block.parameters() if name not in streams else ():
            found.setdefault(id(parameter), name)
    for name, parameter in model.named_parameters():
        found.setdefault(id(parameter), name)
    return found


def records_of(tensors: Iterable[PlannedTensor], record_of: Mapping[int, str]) -> tuple[PlannedRecord, ...]:
    """Return what may lie on the tier `ssd`, in records: weights of streamed units, inputs of units, then state.

    The tensors of a record have one tier. Each piece of weights is a record of its own.
    """
    weights, inputs = [], []
    state: dict[tuple[str, str | None], list[PlannedTensor]] = {}
    num_pieces: dict[str, int] = {}
    for each in tensors:
        if each.role is TensorRole.COMPUTE_WEIGHTS and each.unit:
            name = f"{each.unit} weights" if each.is_updated else f"{each.unit} frozen weights"
            index = num_pieces[name] = num_pieces.get(name, 0) + 1
            weights.append(PlannedRecord(name if index == 1 else f"{name} {index}", each.unit, (each,)))
        elif each.role is TensorRole.ACTIVATIONS:
            inputs.append(PlannedRecord(f"{each.unit} inputs", each.unit, (each,)))
        elif each.in_state:
            # an optimizer may hold what is no parameter of the model
            name = record_of.get(id(each.parameter)) or f"unnamed.{id(each.parameter)}"
            state.setdefault((name, each.tier), []).append(each)
    return (*weights, *inputs, *(PlannedRecord(name, name, tuple(group)) for (name, _), group in state.items()))


def with_slots(
    tensors: Iterable[PlannedTensor], record_of: Mapping[int, str], num_drives: int = 1, num_devices: int = 1
) -> tuple[PlannedTensor, ...]:
    """Return the tensors with the slots in host memory that records of the tier `ssd` need now."""
    others = tuple(each for each in tensors if each.owner != SLOTS_OWNER)
    records = [record for record in records_of(others, record_of) if record.tier == SSD]
    nbytes = slot_bytes(records, num_drives, num_devices)
    return (*others, PlannedTensor(None, TensorRole.STAGING, nbytes, SLOTS_OWNER)) if nbytes else others


def slot_bytes(records: Sequence[PlannedRecord], num_drives: int = 1, num_devices: int = 1) -> int:
    once = update_slot_bytes(records, num_drives) + weight_slot_bytes(records, num_drives)
    return once + num_devices * input_slot_bytes(records, num_drives)


def update_slot_bytes(records: Iterable[PlannedRecord], num_drives: int = 1) -> int:
    # each slot holds the largest of what is updated together
    of_owner: dict[str, int] = {}
    for record in records:
        if record.is_updated:
            of_owner[record.owner] = of_owner.get(record.owner, 0) + record.nbytes_on(num_drives)
    return NUM_UPDATE_SLOTS * max(of_owner.values(), default=0)


def weight_slot_bytes(records: Iterable[PlannedRecord], num_drives: int = 1) -> int:
    return NUM_WEIGHT_SLOTS * max((record.nbytes_on(num_drives) for record in records if record.is_weights), default=0)


def input_slot_bytes(records: Iterable[PlannedRecord], num_drives: int = 1) -> int:
    return NUM_INPUT_SLOTS * max((record.nbytes_on(num_drives) for record in records if record.is_inputs), default=0)
