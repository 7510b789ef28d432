"""`list_tensors`: everything that a run keeps in host memory, listed before any of it exists.

[Note: One inventory]
There is one list. Policies decide about it, the check whether it fits adds it up, the report shows it as planned bytes,
`plan` predicts steps from it, and the run builds its parts from it. So they cannot drift apart::

    inventory = list_tensors(model, optimizers, config, workload)    which tensors, of which role, how large
    decision  = decide(inventory, ...)                               which tier, or split over tiers, for each
    run       = Run(host, inventory, decision, loop)                 places them, and trains

Nothing needs to have values: the model may be on the meta device. The optimizers are those that the user made on the
model as it is; they know which state there will be. Inputs of units are known where a dry run or ``batch_tokens`` tells
the size of a micro-batch; else the first forward of the run tells it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_cxl.config import OffloadConfig
from lightning_cxl.inventory.asked import AskedTiers
from lightning_cxl.inventory.dry_run import DryRun, estimate, known_parameters, units_of
from lightning_cxl.inventory.state import sensitive_parameters, state_tensors
from lightning_cxl.inventory.tensors import (
    GRADIENTS,
    HostTensor,
    PlannedRecord,
    StreamedUnit,
    gradients_at_once,
    grouped,
    of_machine,
    record_names,
    records_of,
    staged_gradients,
    units_by_parameter,
    widened_gradients,
    with_slots,
)
from lightning_cxl.inventory.workload import Overlap, Workload
from lightning_cxl.optim.cpu_adam import Precisions
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.placement.rules import ModuleTiers
from lightning_cxl.shards import is_sharded, local
from lightning_cxl.ssd_options import SSD
from lightning_cxl.streaming.unit_weights import piece_nbytes, tensors_by_parameter
from lightning_cxl.streaming.units import NamedUnits, find_units, streamable


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """The tensors that one run keeps in host memory. See [Note: One inventory]."""

    model: nn.Module
    workload: Workload
    asked: AskedTiers
    """What decorators and rules ask for; `tensors` has the answers."""
    units: NamedUnits
    """Blocks whose inputs are offloaded, and which are recomputed."""
    streamed: tuple[StreamedUnit, ...]
    """Those of them whose weights stream."""
    gathered: tuple[StreamedUnit, ...]
    """Those of them whose shards may lie on the tier `ssd`: in each of several processes with a device apart."""
    tensors: tuple[HostTensor, ...]
    """Tensors that exist at a time, in the order in which they are allocated."""
    gradients: tuple[HostTensor, ...]
    """Gradients of all parameters, also where `tensors` has those of a few units only."""
    staged_bytes: int
    """Bytes of gradients that land in staging memory in one step."""
    measured: DryRun
    """One micro-batch."""
    overlap: Overlap
    reserves_all_gradients: bool
    """Whether there must be room for the gradients of all streamed units at once."""
    record_of: Mapping[int, str]
    """Name of the record that the state of each parameter belongs to on the tier `ssd`, by the parameter's id."""

    @property
    def unit_of(self) -> dict[int, str]:
        """Name of the unit of each parameter that streams, by the parameter's id."""
        return units_by_parameter(self.streamed)

    @property
    def ssd_records(self) -> tuple[PlannedRecord, ...]:
        """Records on the tier `ssd`: weights and inputs by units, then state in the order of optimizers' parameters.

        Inputs have no bytes here where the size of a micro-batch is not known.
        """
        return tuple(record for record in records_of(self.tensors, self.record_of) if record.tier == SSD)

    def copies_of(self, role: TensorRole) -> int:
        """Return how often tensors of a role exist on one machine: each device keeps the inputs of its own units."""
        return self.workload.mesh.num_devices if role is TensorRole.ACTIVATIONS else 1

    def bytes_of(self, role: TensorRole) -> int:
        return sum(each.nbytes for each in self.tensors if each.role is role)


def list_tensors(
    model: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    config: OffloadConfig,
    workload: Workload,
    *,
    asked: AskedTiers | None = None,
    measured: DryRun | None = None,
) -> Inventory:
    """Return what a run of a model keeps. See [Note: One inventory].

    Args:
        optimizers: as the user made them, empty where nothing is trained; one AdamW over all trained parameters when
            None.
    """
    if optimizers is None:
        optimizers = [AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])]
    asked = AskedTiers(model, ModuleTiers({})) if asked is None else asked
    measured = estimate(model, config, workload, "before the first batch") if measured is None else measured
    units = units_of(model, config)
    streams = config.streams_weights(workload.computes_on_host)
    precisions = precisions_of(model, config)
    precisions.consider(optimizers)
    found = list(streamable(model, units if streams else []))
    foreign = _held_by(each for each in optimizers if not precisions.becomes_cpu_adam(each))
    why_not = _why_shards_stay(model, config, workload)
    shards_stay = [*model.parameters()] if workload.mesh.is_sharded else filter(is_sharded, model.parameters())
    stays = foreign | ({id(parameter) for parameter in shards_stay} if why_not else set())
    in_units = {id(parameter) for _, _, own in found for parameter in own}
    held, ssd = _held_by(optimizers), config.ssd()

    def is_updated(parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and id(parameter) in held

    def ask(parameter: nn.Parameter) -> tuple[str | None, str]:
        may_leave = id(parameter) in in_units - stays
        return asked.lookup(parameter, TensorRole.COMPUTE_WEIGHTS, may_leave=may_leave, why_not=why_not)

    def pieces_of(shards: bool) -> tuple[StreamedUnit, ...]:
        units = ((name, module, [p for p in own if is_sharded(p) is shards]) for name, module, own in found)
        return tuple(
            StreamedUnit(name, module, grouped(own, lambda p: (ask(p)[0], ssd is not None and is_updated(p))))
            for name, module, own in units
            if own
        )

    streamed = pieces_of(shards=False)
    gathered = pieces_of(shards=True) if ssd is not None and not why_not else ()
    unit_of = units_by_parameter(streamed)
    all_on_host = workload.computes_on_host or workload.mesh.is_sharded  # with several ranks, shards of all weights
    overlap: Overlap = "none"
    if streamed and config.overlaps_step(workload.computes_on_host):
        overlap = "backward" if workload.updates_in_backward else "forward"
    state = [
        each._replace(unit=unit_of.get(id(each.parameter), ""))
        for each in state_tensors(
            optimizers,
            precisions,
            config,
            accumulates=workload.num_arrivals > 1,
            on_host=lambda p: all_on_host or id(p) in unit_of or is_sharded(p),
        )
    ]
    reserves_all = overlap != "backward" or workload.num_arrivals > 1
    staged, staged_bytes = staged_gradients(state, workload)
    tensors = (
        *_weights(model, (*streamed, *gathered), is_updated, stays, all_on_host=all_on_host),
        *(state if reserves_all else gradients_at_once(state)),
        *widened_gradients(state),
        *staged,
        *(_inputs(measured, units, asked) if optimizers else ()),
    )
    tensors = of_machine([_with_tier(each, asked, why_not) for each in tensors], streamed, workload.mesh)
    gradients = [each for each in state if each.role in GRADIENTS]
    trained = [each.parameter for each in gradients if each.parameter is not None]
    blocks = units if config.activation_offload else find_units(model, config.units)
    record_of = record_names(model, blocks, (*streamed, *gathered))
    return Inventory(
        model=model,
        workload=workload,
        asked=asked,
        units=units,
        streamed=streamed,
        gathered=gathered,
        tensors=with_slots(tensors, record_of, 1 if ssd is None else len(ssd.paths), workload.mesh.num_devices),
        gradients=of_machine(gradients, streamed, workload.mesh),
        staged_bytes=workload.mesh.machine_bytes(staged_bytes, trained),
        measured=measured,
        overlap=overlap,
        reserves_all_gradients=reserves_all,
        record_of=record_of,
    )


def precisions_of(model: nn.Module, config: OffloadConfig) -> Precisions:
    """Return in which precision masters and state of a model's parameters are kept."""
    return Precisions(config.cpu_adam, config.state, config.master, sensitive_parameters(model).__contains__)


def _why_shards_stay(model: nn.Module, config: OffloadConfig, workload: Workload) -> str:
    """Return why no weights that are cut over processes may lie on SSD; an empty text if they may, or none are cut."""
    if not workload.mesh.is_sharded and not any(map(is_sharded, model.parameters())):
        return ""
    if workload.computes_on_host:
        return (
            "weights that are cut over several processes lie there only for devices with memory of their own: a CPU "
            "gathers them from memory. Leave the weights out (optimizer state and activations can lie there), or train "
            "with one process"
        )
    return ""


def _held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of the parameters that optimizers have."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _weights(
    model: nn.Module,
    streamed: Sequence[StreamedUnit],
    is_updated: Callable[[nn.Parameter], bool],
    stays: Set[int],
    *,
    all_on_host: bool,
) -> list[HostTensor]:
    """Return the weights on the host: pieces of units, and all other weights where these are there, too."""
    role = TensorRole.COMPUTE_WEIGHTS
    in_units = units_by_parameter(streamed)

    def piece(unit: StreamedUnit, group: list[nn.Parameter]) -> HostTensor:
        may_leave = not any(id(parameter) in stays for parameter in group)
        nbytes, updated = piece_nbytes(unit.module, group), is_updated(group[0])
        return HostTensor(group[0], role, nbytes, unit.name, is_updated=updated, may_leave=may_leave)

    rest = [p for p in known_parameters(model) if (all_on_host or is_sharded(p)) and id(p) not in in_units]
    tensors = tensors_by_parameter(model) if rest else {}
    return [piece(unit, group) for unit in streamed for group in unit.groups] + [
        HostTensor(parameter, role, sum(local(t).nbytes for t in tensors[id(parameter)])) for parameter in rest
    ]


def _with_tier(each: HostTensor, asked: AskedTiers, why_not: str) -> HostTensor:
    may_leave = each.may_leave or each.in_state or each.role is TensorRole.ACTIVATIONS
    tier, source = asked.lookup(each.owner, each.role, may_leave=may_leave, why_not=why_not)
    return each._replace(tier=tier, source=source, may_leave=may_leave)


def _inputs(measured: DryRun, units: NamedUnits, asked: AskedTiers) -> list[HostTensor]:
    """Return the inputs of units; those without a known size where they are asked for on the tier `ssd`."""
    role, stored = TensorRole.ACTIVATIONS, dict(measured.stored_bytes)
    if not stored:
        stored = {name: 0 for name, _ in units if asked.lookup(name, role, may_leave=True)[0] == SSD}
    return [HostTensor(None, role, nbytes, unit, is_updated=False) for unit, nbytes in stored.items()]
