"""`list_tensors`: everything that a run keeps in host memory, listed before any of it exists.

[Note: One plan]
There is one list, of `PlannedTensor`s. Policies decide about it, the check whether it fits adds it up, the report
shows it as planned bytes, `plan` predicts steps from it, and the run builds its parts from it. So they always agree::

    plan = list_tensors(model, optimizers, config, workload)    which tensors, of which role, how large
    plan = settle_state(plan, ...)                              which of them lie on the tier `ssd`
    plan = decide(plan, ...)                                    which tier, or split over tiers, for each of the others
    run  = Run(host, plan, loop)                                places them, and trains

Nothing needs to have values: the model may be on the meta device. The optimizers are those that the user made on the
model as it is; they know which state there will be. Inputs of units are known where a dry run or ``batch_tokens`` tells
the size of a micro-batch; else the first forward of the run tells it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop, Rprop

from lightning_cxl.config import SSD, OffloadConfig
from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.inventory.dry_run import DryRun, estimate, units_of
from lightning_cxl.inventory.tensors import (
    GRADIENTS,
    Overlap,
    PlannedRecord,
    PlannedTensor,
    StreamedUnit,
    Workload,
    grouped,
    of_machine,
    record_names,
    records_of,
    staged_gradients,
    units_by_parameter,
    widened_gradients,
    with_slots,
)
from lightning_cxl.memory.placement import ModuleTiers, Placement, Placer, TensorRole
from lightning_cxl.optim.cpu_adam import Precisions
from lightning_cxl.optim.kernels import WEIGHT_DTYPES
from lightning_cxl.optim.masters import master_dtype, needs_master
from lightning_cxl.shards import is_sharded, local
from lightning_cxl.streaming.unit_weights import piece_nbytes, tensors_by_parameter
from lightning_cxl.streaming.units import NamedUnits, find_units, streamable

_PARAMETER_ROLES = [role for role in TensorRole if role not in (TensorRole.ACTIVATIONS, TensorRole.STAGING)]
_UPDATE_ROLES = [role for role in _PARAMETER_ROLES if role is not TensorRole.COMPUTE_WEIGHTS]


class AskedTiers:
    """The names of parameters, which modules own them, and what is asked for those modules."""

    def __init__(self, model: nn.Module, tiers: ModuleTiers) -> None:
        self._tiers = tiers
        self._owners: dict[int, list[str]] = {}
        self.names: dict[int, str] = {}
        """First name of every parameter, by the parameter's id."""
        self.read(model)

    def read(self, model: nn.Module) -> None:
        self._owners.clear()
        self.names.clear()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
            self.names.setdefault(id(parameter), name)
        shared = {self.names[key]: owners for key, owners in self._owners.items() if len(owners) > 1}
        for name, role in ((name, role) for name in shared for role in _PARAMETER_ROLES):
            asked = {each: wish for each in shared[name] if (wish := self._tiers.lookup(each, role))[0] is not None}
            if len({tier for tier, _ in asked.values()}) > 1:
                text = " and ".join(f"`{owner}` on tier {tier!r} ({source})" for owner, (tier, source) in asked.items())
                raise ConfigError(
                    f"parameter `{name}` is shared between modules that ask for different tiers for {role.name}: "
                    f"{text}. Give both the same tier."
                )

    def lookup(
        self, owner: Tensor | str, role: TensorRole, *, may_be_on_ssd: bool = False, why_not: str = ""
    ) -> tuple[str | None, str]:
        """Return the tier that is asked for, and who asks; None and an empty text where no decorator or rule does.

        The owner is a parameter, or the name of a unit for its inputs. Where the tier `ssd` is asked for and cannot
        hold it, the tier is None, with the reason; `why_not` says why weights that are cut over processes cannot.
        """
        owners = [owner] if isinstance(owner, str) else self._owners.get(id(owner), [""])
        asked = (self._tiers.lookup(module, role) for module in owners)
        tier, source = next((each for each in asked if each[0] is not None or each[1]), (None, ""))
        if tier != SSD or may_be_on_ssd:
            return tier, source
        name = owner if isinstance(owner, str) else self.names.get(id(owner), "")
        if role is TensorRole.COMPUTE_WEIGHTS:
            if why_not and not isinstance(owner, str) and is_sharded(owner):
                raise UnsupportedError(f"{source} asks for weights of `{name}` on tier {SSD!r}, and {why_not}")
            return None, (
                f"{source} asks for {SSD}, and only weights of units that stream can lie there, if no other optimizer "
                f"than `CPUAdam` writes them"
            )
        if role is not TensorRole.MASTER_WEIGHTS:
            raise UnsupportedError(
                f"{source} asks for {role.value} of `{name}` on tier {SSD!r}, and its optimizer keeps that itself. "
                f"Only state of `CPUAdam` can lie there: use torch's Adam or AdamW with cpu_adam=True, or another tier"
            )
        return None, (
            f"{source} asks for {SSD}, and copies of weights stay in memory: of bfloat16 weights, master='split' puts "
            f"what masters have beyond them there"
        )


_ONE, _TWO = (Adagrad, ASGD, Muon), (Adadelta, Adamax, NAdam, RAdam, Rprop)
"""Optimizers by how many tensors of a parameter's size they keep, whatever their options."""


def num_state_tensors(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """Return how many tensors of a parameter's size its state has; 0 for classes that are not torch's."""
    # Adafactor keeps less than one, LBFGS a history that is shared by all; both count as 0 as well
    if isinstance(optimizer, Adam):  # AdamW too
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, SGD):
        return 1 if group.get("momentum") else 0
    if isinstance(optimizer, RMSprop):
        return 1 + bool(group.get("momentum")) + bool(group.get("centered"))
    return 2 if isinstance(optimizer, _TWO) else 1 if isinstance(optimizer, _ONE) else 0


def sensitive_parameters(model: nn.Module) -> dict[Tensor, None]:
    """Return the parameters of embeddings and norms, as keys: told apart by identity, also in a copy or a pickle.

    As bitsandbytes recommends (arXiv:2110.02861, section 2.3): rows of an embedding that are rarely used have gradients
    of another size than their neighbours in a block. Norms are told by their class name, as every model family
    has its own.
    """
    return {
        parameter: None
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Norm" in type(module).__name__
        for parameter in module.parameters(recurse=False)
    }


_HALF = (torch.bfloat16, torch.float16)


def state_tensors(
    optimizers: Iterable[Optimizer],
    precisions: Precisions,
    config: OffloadConfig,
    *,
    accumulates: bool,
    on_host: Callable[[torch.Tensor], bool],
) -> list[PlannedTensor]:
    """Return masters, gradients and, for CPUAdam, its state; each parameter and role once.

    Master weights of one parameter may be two tensors: a copy, and in `CPUAdam`'s state their lower halves.
    """
    found: dict[tuple[int, TensorRole, bool], PlannedTensor] = {}
    for optimizer in optimizers:
        for group, parameter in ((each, p) for each in optimizer.param_groups for p in each["params"]):
            form = precisions.form_for(optimizer, parameter)
            numel, dtype = local(parameter).numel(), master_dtype(parameter, form)
            separate = needs_master(parameter, dtype, on_host=on_host(parameter))
            half_sums = config.accumulate == "bf16" and parameter.dtype is torch.bfloat16
            grad_dtype = dtype
            if dtype in _HALF or form is not None:
                wide = accumulates and parameter.dtype in _HALF and not half_sums
                grad_dtype = torch.float32 if wide else parameter.dtype
            grad_role = TensorRole.MASTER_GRADS if separate else TensorRole.COMPUTE_GRADS
            bytes_of = {
                TensorRole.MASTER_WEIGHTS: numel * dtype.itemsize if separate else 0,
                grad_role: numel * grad_dtype.itemsize if parameter.requires_grad else 0,
            }
            moment = precisions.moment_bytes(optimizer, parameter)
            in_state = {TensorRole.MASTER_WEIGHTS: 2 * numel if dtype in _HALF and parameter.requires_grad else 0}
            if moment or not parameter.requires_grad:
                in_state |= {TensorRole.MOMENTUM: moment, TensorRole.VARIANCE: moment}
            elif not precisions.becomes_cpu_adam(optimizer):
                # what a torch optimizer makes itself at its first step: all of it counts as momentum
                bytes_of[TensorRole.MOMENTUM] = num_state_tensors(optimizer, group) * numel * dtype.itemsize
            for is_state, sizes in ((False, bytes_of), (True, in_state)):
                for role, nbytes in sizes.items():
                    if nbytes:
                        found[id(parameter), role, is_state] = PlannedTensor(parameter, role, nbytes, in_state=is_state)
    return list(found.values())


def staged_matrices(optimizers: Iterable[Optimizer]) -> list[PlannedTensor]:
    """Return the largest update that Muon has orthogonalised on a device apart: they go there one after the other."""
    groups = [group for each in optimizers if isinstance(each, Muon) for group in each.param_groups]
    largest = max((p for group in groups for p in group["params"]), key=Tensor.numel, default=None)
    if largest is None:
        return []
    return [PlannedTensor(largest, TensorRole.STAGING, largest.numel() * torch.bfloat16.itemsize)]


_Key = tuple[int | str, TensorRole, bool]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tensors that one run keeps in host memory; with a placer, also their placements. See [Note: One plan]."""

    model: nn.Module
    workload: Workload
    asked: AskedTiers
    """The requests of decorators and rules; `tensors` has the answers."""
    units: NamedUnits
    """Blocks whose inputs are offloaded, and which are recomputed."""
    streamed: tuple[StreamedUnit, ...]
    """Those of them whose weights stream."""
    gathered: tuple[StreamedUnit, ...]
    """Those of them whose shards may lie on the tier `ssd`: in each of several processes with a device apart."""
    tensors: tuple[PlannedTensor, ...]
    """Tensors that exist at a time, in the order in which they are allocated."""
    gradients: tuple[PlannedTensor, ...]
    """Gradients of all parameters, also where `tensors` has those of a few units only."""
    staged_bytes: int
    """Bytes of gradients that land in staging memory in one step."""
    on_device: Mapping[str, nn.Parameter]
    """Parameters, by name, whose masters, gradients and state are on the device, and nothing of them on the host."""
    measured: DryRun
    """One micro-batch."""
    overlap: Overlap
    record_of: Mapping[int, str]
    """Name of the record that the state of each parameter belongs to on the tier `ssd`, by the parameter's id."""
    placer: Placer | None = None
    """Answers for tensors in memory; None until `decide`."""
    pins: bool = False
    """What a device copies is page-locked."""
    _tiers: dict[_Key, tuple[str | None, str]] = field(default_factory=dict, init=False, repr=False)
    _placements: dict[_Key, Placement] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        # tiers and their sources by name: some modules make new parameters when they move
        for each in self.tensors:
            self._tiers[self._key(each.owner, each.role, each.in_state)] = each.tier, each.source
        for group in (group for unit in (*self.streamed, *self.gathered) for group in unit.groups):
            keys = [self._key(parameter, TensorRole.COMPUTE_WEIGHTS, False) for parameter in group]
            self._tiers.update(dict.fromkeys(keys, self._tiers[keys[0]]))

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

    def _key(self, owner: Tensor | str, role: TensorRole, in_state: bool) -> _Key:
        return (owner if isinstance(owner, str) else self.asked.names.get(id(owner), id(owner))), role, in_state

    def of(self, tensor: PlannedTensor) -> Placement:
        return self.place(tensor.owner, tensor.role, tensor.nbytes, in_state=tensor.in_state)

    def place(self, owner: Tensor | str, role: TensorRole, nbytes: int, *, in_state: bool = False) -> Placement:
        """Return the placement of the tensor that plays `role` for its owner; decided at the first call."""
        key = self._key(owner, role, in_state)
        if key not in self._placements:
            of_units = role in (TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS)
            may_be_on_ssd = in_state or role is TensorRole.ACTIVATIONS
            tier, source = self._tiers.get(key) or self.asked.lookup(owner, role, may_be_on_ssd=may_be_on_ssd)
            if tier == SSD and of_units:
                self._placements[key] = Placement((tier,), reason=source)
            else:
                self._placements[key] = self.in_memory(role, nbytes, tier, source)
        return self._placements[key]

    def in_memory(self, role: TensorRole, nbytes: int, tier: str | None, source: str) -> Placement:
        """Return the placement of a tensor on a tier of memory, or on one that the policy chooses."""
        assert self.placer is not None, "decided before"
        placement = self.placer.place(role, nbytes, tier=tier, source=source)
        if tier is None and source:
            placement = replace(placement, reason=f"{placement.reason}; {source}")
        return replace(placement, pinned=True) if self.pins and role.is_copied else placement

    def report(self) -> dict[str, Any]:
        roles: dict[str, dict[str, int]] = {}
        reasons: dict[str, dict[str, None]] = {}  # an ordered set per role
        for each in self.tensors:
            placement, tiers = self.of(each), roles.setdefault(each.role.value, {})
            for tier, size in placement.split_bytes(each.nbytes).items():
                tiers[tier] = tiers.get(tier, 0) + size
            reasons.setdefault(each.role.value, {})[placement.describe()] = None
        return {"planned_roles": roles, "reasons": {role: list(texts) for role, texts in reasons.items()}}


_Unit = tuple[str, nn.Module, list[nn.Parameter]]


def list_tensors(
    model: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    config: OffloadConfig,
    workload: Workload,
    *,
    asked: AskedTiers | None = None,
    measured: DryRun | None = None,
) -> Plan:
    """Return what a run of a model keeps.

    The optimizers are as the user made them, empty where nothing is trained; None: one AdamW over all trained
    parameters.
    """
    if optimizers is None:
        optimizers = [AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])]
    asked = AskedTiers(model, ModuleTiers({})) if asked is None else asked
    measured = estimate(model, config, workload, "before the first batch") if measured is None else measured
    units = units_of(model, config)
    streams = config.streams_weights(workload.computes_on_host)
    precisions = precisions_of(model, config)
    precisions.consider(optimizers)
    found = _streaming(list(streamable(model, units if streams else [])), config.units_on_device)
    foreign = _held_by(each for each in optimizers if not precisions.becomes_cpu_adam(each))
    cut = [*(model.parameters() if workload.mesh.is_sharded else filter(is_sharded, model.parameters()))]
    why_not = ""  # no weights that are cut over processes may lie on SSD
    if cut and workload.computes_on_host:
        why_not = (
            "weights that are cut over several processes lie there only for devices with memory of their own: a CPU "
            "gathers them from memory. Leave the weights out (optimizer state and activations can lie there), or train "
            "with one process"
        )
    if cut and streams and config.units_on_device:
        raise ConfigError(
            f"units_on_device={config.units_on_device} is for one process: with several, each device has a part of all "
            "weights and gathers a unit when it computes. Leave the option out"
        )
    if cut and config.state_on_device and not workload.computes_on_host:
        raise ConfigError(
            "state_on_device=True is for one process: with several, each has the state of its shards on the host. "
            "Leave the option out"
        )
    stays = foreign | ({id(parameter) for parameter in cut} if why_not else set())
    in_units = {id(parameter) for _, _, own in found for parameter in own}
    held, ssd = _held_by(optimizers), config.ssd()

    def is_updated(parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and id(parameter) in held

    def ask(parameter: nn.Parameter) -> tuple[str | None, str]:
        may_be_on_ssd = id(parameter) in in_units - stays
        return asked.lookup(parameter, TensorRole.COMPUTE_WEIGHTS, may_be_on_ssd=may_be_on_ssd, why_not=why_not)

    def pieces_of(shards: bool) -> tuple[StreamedUnit, ...]:
        units = ((name, module, [p for p in own if is_sharded(p) is shards]) for name, module, own in found)
        return tuple(
            StreamedUnit(name, module, grouped(own, lambda p: (ask(p)[0], ssd is not None and is_updated(p))))
            for name, module, own in units
            if any(parameter.ndim for parameter in own)  # scalars beside shards, which are not cut, stay on the device
        )

    streamed = pieces_of(shards=False)
    gathered = pieces_of(shards=True) if ssd is not None and not why_not else ()
    unit_of = units_by_parameter(streamed)
    gradient_unit_of = dict(unit_of)  # of what leaves a device, shards as well
    if not workload.computes_on_host:
        gradient_unit_of |= {id(p): name for name, _, own in found for p in own if is_sharded(p)}
    all_on_host = workload.computes_on_host or workload.mesh.is_sharded  # with several ranks, shards of all weights
    overlap: Overlap = "none"
    on_device = bool(units) and not workload.computes_on_host
    if (streamed or (on_device and not gathered)) and config.overlaps_step(workload.computes_on_host):
        overlap = "both" if workload.updates_in_backward else "forward"
    stay: dict[str, nn.Parameter] = {}
    if config.state_on_device and not all_on_host:
        stay = {
            asked.names[id(p)]: p
            for each in optimizers
            for group in each.param_groups
            for p in group["params"]
            if id(p) in asked.names and id(p) not in unit_of and precisions.form_for(each, p) is not None
            if p.requires_grad and p.dtype in WEIGHT_DTYPES
            if not any(asked.lookup(p, role, may_be_on_ssd=True)[0] for role in _UPDATE_ROLES)
        }
    without_host = {id(parameter) for parameter in stay.values()}
    state = [
        each._replace(unit=gradient_unit_of.get(id(each.parameter), ""))
        for each in state_tensors(
            optimizers,
            precisions,
            config,
            accumulates=workload.num_arrivals > 1,
            on_host=lambda p: all_on_host or id(p) in unit_of or is_sharded(p),
        )
        if id(each.parameter) not in without_host
    ]
    staged, staged_bytes = staged_gradients(state, workload)
    tensors = (
        *_weights(model, (*streamed, *gathered), is_updated, stays, all_on_host=all_on_host),
        *state,
        *widened_gradients(state),
        *staged,
        *(() if all_on_host else staged_matrices(optimizers)),
        *(_inputs(measured, units, asked) if optimizers else ()),
    )
    tensors = of_machine([_with_tier(each, asked, why_not) for each in tensors], streamed, workload.mesh)
    gradients = [each for each in state if each.role in GRADIENTS]
    trained = [each.parameter for each in gradients if each.parameter is not None]
    blocks = units if config.activation_offload else find_units(model, config.units)
    record_of = record_names(model, blocks, (*streamed, *gathered))
    return Plan(
        model=model,
        workload=workload,
        asked=asked,
        units=units,
        streamed=streamed,
        gathered=gathered,
        tensors=with_slots(tensors, record_of, 1 if ssd is None else len(ssd.paths), workload.mesh.num_devices),
        gradients=of_machine(gradients, streamed, workload.mesh),
        staged_bytes=workload.mesh.machine_bytes(staged_bytes, trained),
        on_device=stay,
        measured=measured,
        overlap=overlap,
        record_of=record_of,
    )


def _streaming(found: list[_Unit], num_on_device: int) -> list[_Unit]:
    """Return the units that stream. Of the others those come first that no step writes, spread evenly."""
    trained = [index for index, (_, _, own) in enumerate(found) if any(p.requires_grad for p in own)]
    frozen = sorted(set(range(len(found))) - set(trained))
    stay: set[int] = set()
    for indices in (frozen, trained):
        count = min(len(indices), num_on_device - len(stay))
        # the first is one of them: its backward comes last, and the next forward needs it first
        stay |= {indices[number * len(indices) // count] for number in range(count)}
    return [unit for index, unit in enumerate(found) if index not in stay]


def precisions_of(model: nn.Module, config: OffloadConfig) -> Precisions:
    return Precisions(config.cpu_adam, config.state, config.master, sensitive_parameters(model).__contains__)


def _held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _weights(
    model: nn.Module,
    streamed: Sequence[StreamedUnit],
    is_updated: Callable[[nn.Parameter], bool],
    stays: Set[int],
    *,
    all_on_host: bool,
) -> list[PlannedTensor]:
    """Return the weights on the host: pieces of units, and all other weights where these are there, too."""
    role = TensorRole.COMPUTE_WEIGHTS
    in_units = units_by_parameter(streamed)

    def piece(unit: StreamedUnit, group: list[nn.Parameter]) -> PlannedTensor:
        may_be_on_ssd = not any(id(parameter) in stays for parameter in group)
        nbytes, updated = piece_nbytes(unit.module, group), is_updated(group[0])
        return PlannedTensor(group[0], role, nbytes, unit.name, is_updated=updated, may_be_on_ssd=may_be_on_ssd)

    rest = [p for p in model.parameters() if (all_on_host or is_sharded(p)) and id(p) not in in_units]
    tensors = tensors_by_parameter(model) if rest else {}
    return [piece(unit, group) for unit in streamed for group in unit.groups] + [
        PlannedTensor(parameter, role, sum(local(t).nbytes for t in tensors[id(parameter)])) for parameter in rest
    ]


def _with_tier(each: PlannedTensor, asked: AskedTiers, why_not: str) -> PlannedTensor:
    may_be_on_ssd = each.may_be_on_ssd or each.in_state or each.role is TensorRole.ACTIVATIONS
    tier, source = asked.lookup(each.owner, each.role, may_be_on_ssd=may_be_on_ssd, why_not=why_not)
    return each._replace(tier=tier, source=source, may_be_on_ssd=may_be_on_ssd)


def _inputs(measured: DryRun, units: NamedUnits, asked: AskedTiers) -> list[PlannedTensor]:
    """Return the inputs of units; those without a known size where they are asked for on the tier `ssd`."""
    role, stored = TensorRole.ACTIVATIONS, dict(measured.stored_bytes)
    if not stored:
        stored = {name: 0 for name, _ in units if asked.lookup(name, role, may_be_on_ssd=True)[0] == SSD}
    return [PlannedTensor(None, role, nbytes, unit, is_updated=False) for unit, nbytes in stored.items()]
