"""`Run`: one training run, built from a plan. Knows no framework.

[Note: Order of life]
Built: the host (topology, memory, policy, engine); then, with the model, the plan; then the run
places the weights and builds what receives gradients, streams weights and offloads inputs; then it adopts optimizers.
Torn down in the opposite order by `Run.close` and `Host.close`, which may be called at any moment, any number of times.
The user's own tensors outlive both: the weights stay where they are, inside the model, and optimizer state stays
with the optimizers (as with plain Lightning, so that a checkpoint can still be saved after a run); both are freed when
those objects are. A later checkpoint needs its `FinishedRun` alone.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cxl.config import SSD, OffloadConfig
from lightning_cxl.devices import TransferEngine, device_type_of, make_engine
from lightning_cxl.errors import LightningCXLError, SpillWarning, TierFullError, warn
from lightning_cxl.gradients import step
from lightning_cxl.gradients.guard import GradientMeter, OverflowGuard
from lightning_cxl.gradients.offload import GradientOffload, HostWorker, attach_zero_grad, detach_zero_grad
from lightning_cxl.inventory.plan import AskedTiers, Plan, list_tensors, precisions_of
from lightning_cxl.inventory.tensors import SLOTS_OWNER, Loop, StreamedUnit, Workload
from lightning_cxl.machine.binding import RankBinding
from lightning_cxl.machine.speeds import ssd_of
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.hook import HostAllocationMode, activate
from lightning_cxl.memory.host_memory import (
    HeapTrimmer,
    HostMemory,
    is_dense,
    is_ordinary,
    laid_out_as,
    large_blocks_apart,
    mirror,
)
from lightning_cxl.memory.placement import Placement, Placer, TensorRole, resolve
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.kernels import kernel_threads
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.planning.decide import RunPolicy, decide, free_for, settle_gradients, settle_state
from lightning_cxl.planning.policies import PlanningPolicy
from lightning_cxl.run.state_on_ssd import StateOnSsd
from lightning_cxl.sharding.fsdp import place_shards, pooled_exchanges
from lightning_cxl.sharding.host_shard import ShardedUnit, sharded_units
from lightning_cxl.shards import is_sharded, local, sharded_like
from lightning_cxl.storage.drive import BLOCK_BYTES
from lightning_cxl.streaming import quantised
from lightning_cxl.streaming.activations import DEFAULT_MIN_BYTES, ActivationOffload
from lightning_cxl.streaming.on_ssd import InputOnSsd, ShardsOnSsd, WeightRecord
from lightning_cxl.streaming.unit_weights import HostCopy, InMemory, ParamStreamer, UnitWeights, peek
from lightning_cxl.streaming.units import owners_in

_TRIM_BYTES = 64 * 2**20  # of state that has moved
_ALIGNMENT = 64  # bytes: a cache line, and what vectors of every element type start at


class PlacedMemory:
    """Gives memory for parameters and units by role; the heap is trimmed before gradients get some."""

    def __init__(self, memory: HostMemory, placements: Plan, heap: HeapTrimmer | None) -> None:
        self.memory = memory
        self.placements = placements
        self._heap = heap
        self.on_ssd: StateOnSsd | None = None
        self._warned_of_ssd = False

    def like(self, parameter: torch.Tensor, role: TensorRole, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor shaped and laid out as what this process holds of a parameter of the model."""
        self._trim_for(role)
        shard = local(parameter)
        placement = self.placements.place(parameter, role, shard.numel() * dtype.itemsize)
        if role is TensorRole.MASTER_WEIGHTS and parameter.device.type != "cpu" and dtype is parameter.dtype:
            # a device copies them as they are after every step
            placement = replace(placement, pinned=True)
        return self._mirrored(shard, dtype, placement, role)

    def _mirrored(
        self, value: torch.Tensor, dtype: torch.dtype, placement: Placement, role: TensorRole
    ) -> torch.Tensor:
        return mirror(value, dtype, lambda count, each: self.memory.tensor((count,), each, placement, role))

    def like_all(self, wanted: Sequence[tuple[nn.Parameter, torch.dtype]], role: TensorRole) -> list[torch.Tensor]:
        """Return what `like` would for each parameter, those of one placement in one piece of memory."""
        self._trim_for(role)
        by_placement: dict[Placement, list[int]] = {}
        for index, (parameter, dtype) in enumerate(wanted):
            placement = self.placements.place(parameter, role, local(parameter).numel() * dtype.itemsize)
            by_placement.setdefault(placement, []).append(index)
        tensors: dict[int, torch.Tensor] = {}
        for placement, indices in by_placement.items():
            parts = [(local(wanted[index][0]), wanted[index][1]) for index in indices]
            sizes = [shard.numel() * dtype.itemsize for shard, dtype in parts]
            starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes[:-1])]
            piece = self.memory.allocate(starts[-1] + sizes[-1], placement, role)
            for index, (shard, dtype), start in zip(indices, parts, starts, strict=True):
                tensors[index] = laid_out_as(piece.tensor((shard.numel(),), dtype, start), shard)
        return [tensors[index] for index in range(len(wanted))]

    def _trim_for(self, role: TensorRole) -> None:
        if self._heap is not None and role in (TensorRole.COMPUTE_GRADS, TensorRole.MASTER_GRADS):
            self._heap.trim()  # in backward, where the C library's heap grows most

    def flat(self, parameter: torch.Tensor, role: TensorRole, dtype: torch.dtype, numel: int) -> torch.Tensor:
        placement = self.placements.place(parameter, role, numel * dtype.itemsize, in_state=True)
        if placement.tiers[0] == SSD and numel == 0:  # other processes have all of it
            return torch.empty(0, dtype=dtype)
        if placement.tiers[0] == SSD:
            assert self.on_ssd is not None, "what belongs on the tier `ssd` is in the plan"
            name = self.placements.asked.names.get(id(parameter), "unnamed")
            return self.on_ssd.flat(parameter, name, role, dtype, numel)
        return self.memory.tensor((numel,), dtype, placement, role)

    def slots(self, nbytes: int) -> Buffer:
        placement = self.placements.place(SLOTS_OWNER, TensorRole.STAGING, nbytes)
        return self.memory.allocate(nbytes, placement, TensorRole.STAGING, alignment=BLOCK_BYTES)

    def activation(self, nbytes: int, unit: str) -> Buffer:
        placement = self.placements.place(unit, TensorRole.ACTIVATIONS, nbytes)
        if placement.tiers[0] == SSD:  # which is full
            placement = self.placements.in_memory(TensorRole.ACTIVATIONS, nbytes, None, "tier ssd is full")
        return self.memory.allocate(nbytes, placement, TensorRole.ACTIVATIONS)

    def activation_on_ssd(self, nbytes: int, unit: str) -> InputOnSsd | None:
        """Return a place on the tier `ssd` for an input of a unit; None where it belongs in memory, or has no room."""
        placement = self.placements.place(unit, TensorRole.ACTIVATIONS, nbytes)
        if placement.tiers[0] != SSD or self.on_ssd is None:  # no drives: nothing is trained
            return None
        try:
            return self.on_ssd.inputs.place(nbytes)
        except TierFullError as error:
            if self.memory.on_tier_full == "error":
                raise
            if not self._warned_of_ssd:
                self._warned_of_ssd = True
                text = f"an input of `{unit}` stays in memory, and others may: tier `ssd` is full ({error})"
                warn(text, SpillWarning)
            return None

    def piece(self, nbytes: int, parameters: Sequence[nn.Parameter]) -> HostCopy:
        """Return memory or a record for the weights of several parameters that belong on the same tier."""
        self.memory.trim()  # what earlier moves of weights have left: its stack is no longer in use
        placement = self.placements.place(parameters[0], TensorRole.COMPUTE_WEIGHTS, nbytes)
        if placement.tiers[0] == SSD:
            assert self.on_ssd is not None, "what belongs on the tier `ssd` is in the plan"
            return self.on_ssd.weight_record(parameters[0])
        buffer = self.memory.allocate(nbytes, placement, TensorRole.COMPUTE_WEIGHTS)
        return InMemory(buffer, is_inherited=not (placement.pinned and self.memory.pins))

    def on_drives(self, parameters: Sequence[nn.Parameter]) -> WeightRecord | None:
        """Return the record of the shards of several parameters that belong on the same tier; None: it is memory."""
        placement = self.placements.place(parameters[0], TensorRole.COMPUTE_WEIGHTS, 0)
        if placement.tiers[0] != SSD or self.on_ssd is None:
            return None
        return self.on_ssd.weight_record(parameters[0])

    def weights(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor | None:
        role = TensorRole.COMPUTE_WEIGHTS
        placement = self.placements.place(parameter, role, tensor.nbytes)
        if self._is_placed(tensor, placement):
            return None
        return self._mirrored(tensor, tensor.dtype, placement, role)

    def shard(self, parameter: nn.Parameter, shard: torch.Tensor, numel: int) -> torch.Tensor | None:
        """Return 1-D memory for the shard of a parameter's weights; None if it is where it belongs, or goes to SSD."""
        role = TensorRole.COMPUTE_WEIGHTS
        placement = self.placements.place(parameter, role, numel * shard.element_size())
        if numel == 0 or placement.tiers[0] == SSD or self._is_placed(shard, placement):
            return None
        return self.memory.tensor((numel,), shard.dtype, placement, role)

    def place_state(self, optimizer: Optimizer, compute_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move an optimizer's state in ordinary memory to where the policy wants it."""
        if isinstance(optimizer, CPUAdam):
            return  # keeps to the memory it was given
        heap, left_bytes = HeapTrimmer(), 0  # piece by piece: the C library would keep most of what state leaves
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                shard = local(value)
                if shard.dim() == 0 or not is_ordinary(shard) or self.memory.tier_at(shard.data_ptr()) is not None:
                    continue
                # views of a larger buffer stay: an optimizer may count on it
                if not is_dense(shard) or shard.untyped_storage().nbytes() != shard.nbytes:
                    continue
                role = TensorRole.MOMENTUM
                placement = self.placements.place(compute_of(parameter), role, shard.nbytes)
                # with its strides: fused kernels read it flat
                state[key] = sharded_like(self._mirrored(shard, shard.dtype, placement, role).copy_(shard), value)
                left_bytes += shard.nbytes
                del value, shard
                if left_bytes >= _TRIM_BYTES:
                    heap.trim_now()
                    left_bytes = 0
        if left_bytes:
            heap.trim_now()

    def _is_placed(self, tensor: torch.Tensor, placement: Placement) -> bool:
        return is_ordinary(tensor) and self.memory.is_placed(tensor.data_ptr(), placement)


class Host:
    """The machine, before there is a model. See [Note: Order of life]."""

    def __init__(
        self,
        config: OffloadConfig,
        device: torch.device,
        topology: Topology | None = None,
        policy: PlanningPolicy | None = None,
        binding: RankBinding | None = None,
    ) -> None:
        self.engine = make_engine(device)
        at = self.engine.device
        is_asked = config.stream_weights is True or config.overlap_step is True
        if not is_asked and at.type != "cpu" and device_type_of(at).is_integrated(at.index):
            log.warning(f"weights do not stream: `{at}` computes in the memory of the host")
            config = replace(config, stream_weights=False)
        self.config = config
        self.device = device
        self._shared = binding.notes if binding else ()
        budgets, room = (binding.budgets, binding.room) if binding else (config.budgets(), {})
        topology = binding.topology if binding else topology
        found = topology or Topology.detect(on_missing_tier=config.on_missing_tier)
        self.ssd_options = options = binding.ssd if binding else config.ssd()  # the part of this process
        self.topology = found if options is None else found.with_ssd(options)
        self.ssd = None if options is None else ssd_of(self.topology)
        pin = device.type != "cpu" if config.pin_memory == "auto" else bool(config.pin_memory)
        full = config.on_tier_full
        self.memory = HostMemory(self.topology, budgets=budgets, room=room, on_tier_full=full, pin=pin)
        self.policy = RunPolicy(config, self.topology, device, policy)
        self.placer = Placer(self.topology, self.memory.free_bytes, cpu_computes=self.policy.cpu_computes)

    @property
    def streams_weights(self) -> bool:
        return self.config.streams_weights(self.engine.computes_on_host)

    def activate(self) -> AbstractContextManager[Any]:
        """Return a region in which `lightning_cxl.empty` and `host_allocation` use this memory and its budgets."""
        return activate(self.memory, self.placer)

    def creating_weights(self) -> AbstractContextManager[Any]:
        """Return a region in which torch's host tensors are placed as compute weights."""
        return HostAllocationMode(self.memory, self.placer, role=TensorRole.COMPUTE_WEIGHTS)

    def plan(self, model: nn.Module, optimizers: Sequence[Optimizer], loop: Loop) -> Plan:
        tiers = resolve(model.named_modules(remove_duplicate=False), self.config.tier_rules, self.topology)
        objection = step.why_after_backward(loop.needs_whole_step, optimizers)
        workload = Workload(
            batch=1,
            sequence=self.config.batch_tokens or 0,
            num_micro_batches=2 if loop.accumulates else 1,
            computes_on_host=self.engine.computes_on_host,
            updates_in_backward=objection is None,
        )
        plan = list_tensors(model, optimizers, self.config, workload, asked=AskedTiers(model, tiers))
        if optimizers and plan.overlap == "forward":
            log.info(f"the optimizer's step runs behind the next forward, not behind the backward: {objection}")
        room = free_for(model, self.memory).usable_bytes
        plan = settle_gradients(plan, room)
        if self.ssd is not None:
            _warn_of_weights_that_stay(plan)
            plan = settle_state(plan, room, self.ssd, self.config.on_tier_full)
            if plan.ssd_records and plan.units and not self.config.batch_tokens:
                log.info("no memory is kept for activations: with `batch_tokens`, more goes to the tier ssd instead")
        return plan

    def decide(self, plan: Plan) -> Plan:
        return decide(plan, self.policy, self.memory, self.config.on_tier_full, self.ssd)

    def report(self, state: str, on_ssd: StateOnSsd | None) -> dict[str, Any]:
        stats = self.memory.stats()
        if (tier := self.topology.ssd) is not None:
            used = 0 if on_ssd is None else on_ssd.store.stats()["reserved_bytes"]
            stats["tiers"][tier.name] = {
                **dict.fromkeys(("capacity_bytes", "budget_bytes"), tier.capacity_bytes),
                **dict.fromkeys(("used_bytes", "peak_bytes", "held_bytes"), used),
            }
        return {
            "state": state,
            "device": str(self.device),
            **stats,
            "policy": self.policy.name,
            "ssd": {} if on_ssd is None else on_ssd.moved_per_step(),
            "notes": [*self.topology.notes, *self._shared, *self.memory.notes()],
        }

    def close(self) -> None:
        """Free everything that no tensor of the user's is in. Idempotent."""
        with ExitStack() as cleanup:
            cleanup.callback(self.memory.close)
            cleanup.callback(self.engine.close)


def _warn_of_weights_that_stay(plan: Plan) -> None:
    """Say it where weights are asked for on the tier `ssd` and none can lie there: memory has to hold all of them."""
    role = TensorRole.COMPUTE_WEIGHTS
    weights = [each for each in plan.tensors if each.role is role]
    if any(each.tier == SSD for each in weights):
        return
    rows = {id(each.parameter): (each.tier, each.source) for each in weights}
    wishes = (rows.get(id(p)) or plan.asked.lookup(p, role) for p in plan.model.parameters())
    why = next((why for tier, why in wishes if tier is None and why), None)
    if why is not None:
        warn(
            f"no weights lie on tier `ssd`: {why}. Set stream_weights=True, train with torch's Adam or AdamW, or ask "
            f"for weights inside of units"
        )


# Where a model's compute weights live.
#
# [Note: Placement of compute weights]
# * The CPU computes: in host memory that the policy placed.
# * A device apart: on the device, except those that stream.
# * Cut over several processes: the shards in host memory that the policy placed, or on SSD, for a device apart
#   ([Note: Shards on SSD]). Quantised layers are whole, and stream as with one.
# * Streamed (`stream_weights`): the parameters of units, each unit in one piece of host memory per tier, and on the
#   device only while the unit computes ([Note: Residency of a unit]). What units share with others, and what lies
#   outside of them (embedding, final norm, head), does not stream.
#
# Where the CPU computes, a parameter that moves keeps its identity, shape, strides and values; its memory is its own
# (nothing else lies in its storage, so saving one parameter saves just that).

PlaceLike = Callable[[nn.Parameter, torch.Tensor], torch.Tensor | None]
"""Returns an uninitialised host tensor like a parameter or one that belongs to it, placed for its weights; None if it
is in place already."""


@torch.no_grad()
def place_weights(model: nn.Module, place: PlaceLike) -> tuple[str, ...]:
    """Move every parameter of `model` to the memory that `place` gives; returns the names of those that stay put.

    Those are parameters whose storage is shared with another tensor of the model (moving one would cut the tie), and
    tensor subclasses with storage of their own kind. Shards have moved before.
    """
    named = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    plain = {name: p for name, p in named.items() if type(p.data) is torch.Tensor}
    uses = Counter(_storage_id(t) for t in [*plain.values(), *buffers.values()] if type(t.data) is torch.Tensor)
    kept = [name for name in named if name not in plain and not is_sharded(named[name])]
    module_of = owners_in(model)
    for name, parameter in plain.items():
        if parameter.numel() == 0 or parameter.device.type != "cpu":
            continue
        if parameter.layout is not torch.strided or uses[_storage_id(parameter)] > 1:
            kept.append(name)
            continue
        module = module_of[id(parameter)]
        tensors = quantised.tensors_of(module, parameter)
        moved = {key: (place(parameter, tensor), tensor.detach()) for key, tensor in tensors.items()}
        if any(memory is not None for memory, _ in moved.values()):
            quantised.show(
                module, parameter, {k: old if new is None else new.copy_(old) for k, (new, old) in moved.items()}
            )
        del tensors, moved  # the old memory goes before the next is taken
    return tuple(kept)


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.numel() else id(tensor)


def place_model(
    model: nn.Module,
    memory: PlacedMemory,
    engine: TransferEngine,
    streamed: Sequence[StreamedUnit],
    gathered: Sequence[StreamedUnit],
    undo: ExitStack,
) -> tuple[list[UnitWeights], tuple[str, ...]]:
    """Move a model's weights; return units that stream, and names of parameters that stay in ordinary memory."""
    streamed_ids = frozenset(id(p) for unit in streamed for group in unit.groups for p in group)
    on_host = engine.device.type == "cpu"
    quantised.warn_of_wide_experts(model)
    undo.callback(quantised.prepare_layers(model, streamed_ids))
    if on_host and quantised.has_quantised(model):
        undo.enter_context(large_blocks_apart())
    units = [UnitWeights(name, module, groups, memory.piece) for name, module, groups in streamed]
    if on_host:
        undo.enter_context(pooled_exchanges(model))
    groups = [group for unit in gathered for group in unit.groups]
    on_drives = [(home, group) for group in groups if (home := memory.on_drives(group)) is not None]
    place_shards(model, memory.shard, engine)
    for home, group in on_drives:
        undo.callback(ShardsOnSsd(home, engine, model, group).close)
    if on_host:
        return units, place_weights(model, lambda p, each: None if id(p) in streamed_ids else memory.weights(p, each))
    # what does not stream moves through the model's own `to`: modules may do more there than move tensors
    own = [module.__dict__ for module in model.modules()]  # what is set on a compiled module, the one inside gets
    before = [(attributes, attributes["_parameters"]) for attributes in own]
    for attributes, parameters in before:
        rest = {n: p for n, p in parameters.items() if p is None or id(p) not in streamed_ids}
        attributes["_parameters"] = rest
    try:
        model.to(engine.device)
    finally:
        for attributes, parameters in before:
            moved = attributes["_parameters"]
            kept = {n: moved.get(n, p) for n, p in parameters.items() if n in moved or id(p) in streamed_ids}
            attributes["_parameters"] = kept | moved  # in the old order; the move may also drop some and add others
        for module in (each for each in model.modules() if isinstance(each, nn.RNNBase)):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, parameter)  # also in its own list, which the move made of what it saw
    return units, ()


def bring_to_host(model: nn.Module, device: torch.device) -> None:
    """Move a model from the device that has trained it to the host. Where an error is on its way, that one is shown."""
    if device.type == "cpu":
        return
    error = sys.exc_info()[1]
    try:
        model.cpu()
    except Exception:  # torch replaces no parameter that an error's traceback still leads to
        if error is None:
            raise
        log.warning("after an error, weights stay on `%s`", device, exc_info=True)


log = logging.getLogger(__name__)


@dataclass(slots=True)
class FinishedRun:
    masters: MasterWeights
    num_received: int  # gradients received in all


class Run:
    """Weights in their places, units wrapped, gradients received; optimizers are adopted by `adopt`."""

    min_activation_bytes = DEFAULT_MIN_BYTES  # inputs of units smaller than this stay where they are

    def __init__(self, host: Host, plan: Plan, loop: Loop) -> None:
        config, engine, model = host.config, host.engine, plan.model
        if config.activation_offload and not plan.units:
            log.info("no repeated blocks found: activations are not offloaded; name the blocks in `units`")
        self._host = host
        self._loop = loop
        self._ended_by_error = False
        self._model = model
        self.units = tuple(name for name, _ in plan.units)
        self._heap = HeapTrimmer() if plan.units and engine.computes_on_host else None  # inputs of units go through it
        self._planned = plan.report()  # inputs of units are in it where `batch_tokens` is given
        self._placed = PlacedMemory(host.memory, plan, self._heap)
        self.masters = MasterWeights(plan.asked.names, self._placed.like, engine, plan.on_device)
        """The master weights; `wait_for_updates` before their values are read."""
        self.meter = GradientMeter(kernel_threads(config, engine.computes_on_host))
        self.meter.trusts_versions = not loop.edits_gradients
        self.guard = OverflowGuard(config.on_overflow, config.max_overflows, self.masters.name_of, self.meter)
        """Keeps optimizers from gradients that are not finite."""
        self.optimizers: list[Optimizer] = []
        with ExitStack() as cleanup:  # last in, first out; one that fails does not keep the others from running
            cleanup.callback(self.masters.bring_to_host)
            self.on_ssd: StateOnSsd | None = None
            if host.ssd_options is not None and plan.ssd_records:
                budget_bytes = host.topology.tier(SSD).capacity_bytes
                self.on_ssd = self._placed.on_ssd = StateOnSsd(
                    host.ssd_options, budget_bytes, plan.ssd_records, self._placed.slots, engine
                )
                cleanup.callback(self._end, self.on_ssd.close)
            self._streamer: ParamStreamer | None = None
            cleanup.callback(lambda: self._streamer.detach() if self._streamer is not None else None)
            units, self._unplaced = place_model(model, self._placed, engine, plan.streamed, plan.gathered, cleanup)
            plan.asked.read(model)  # some modules make new parameters when they move
            activations = ActivationOffload(
                engine,
                self._placed.activation,
                min_bytes=self.min_activation_bytes,
                place_on_ssd=self._placed.activation_on_ssd,
            )
            streamer = self._streamer = ParamStreamer(engine, units, lambda: activations.phase) if units else None
            behind = plan.overlap != "none"
            shards = sharded_units(model) if behind and not engine.computes_on_host else []
            on_host: list[UnitWeights | ShardedUnit] = [*units, *shards]
            executor = ThreadPoolExecutor(1, "lightning_cxl", engine.use_in_this_thread) if behind else None
            worker = None if executor is None else HostWorker(executor)
            self._grads = GradientOffload(
                engine,
                self._placed.like_all,
                self.meter,
                worker,
                (lambda: None) if streamer is None else streamer.release,  # [Note: Which hooks stay]
                {id(parameter): unit for unit in on_host for parameter in unit.parameters},
                half_sums=config.accumulate == "bf16",
                reserves_streamed=plan.overlap != "backward",
                guard=None if config.on_overflow == "ignore" and loop.needs_whole_step is None else self.guard,
                are_read_early=loop.reads_gradients,
            )
            resident = []
            if behind and not engine.computes_on_host and not any(map(is_sharded, peek(model))):
                resident = step.waiting_forwards(
                    model, (module for _, module in plan.units), (unit.module for unit in plan.streamed)
                )
            for each in resident:
                cleanup.callback(each.remove)
            self._updates = step.Updates(
                on_host,
                self.masters,
                self._grads,
                streamer,
                worker,
                in_backward=plan.overlap in ("backward", "both"),
                max_in_flight=step.MAX_UNITS_IN_FLIGHT if plan.overlap == "backward" else len(on_host),
                guard=self.guard,
                parameters=peek(model),
                awaited={id(p): number for number, each in enumerate(resident) for p in each.module.parameters()},
            )
            for each in resident:
                each.updates = self._updates
            cleanup.callback(self._grads.close)
            if streamer is not None:
                streamer.attach(self._grads)
            cleanup.callback(activations.detach)
            activations.attach(plan.units, model)
            self._precisions = precisions_of(model, config)
            self._adoption = step.Adoption(
                self._precisions,
                self.masters,
                self._grads,
                self.guard,
                self._updates,
                self._placed.flat,
                self._placed.place_state,
                self.meter,
                None if self.on_ssd is None else self.on_ssd.state,
                partial(step.orthogonalise_on_device, engine, self._placed.slots),
            )
            cleanup.callback(self._end, self._adoption.release)
            if executor is not None:
                cleanup.callback(executor.shutdown)
            self._cleanup = cleanup.pop_all()

    def activate(self) -> AbstractContextManager[Any]:
        """Return a region in which `lightning_cxl.empty` and `host_allocation` follow this run's plan."""
        placer = self._placed.placements.placer
        assert placer is not None, "decided before"
        return activate(self._host.memory, placer)

    def adopt(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Return the optimizers that take the place of the user's, in the same order. See [Note: Adoption]."""
        if self.on_ssd is not None:
            self.on_ssd.refuse_state_of_earlier_run(optimizers)
        self._host.memory.trim()  # what weights that have moved have left
        self._precisions.consider(optimizers)
        try:
            self.optimizers = [self._adoption.adopt(optimizer) for optimizer in optimizers]
            self._updates.note_masters()
        except BaseException:
            self._ended_by_error = True
            self._end(self._adoption.release)
            raise
        if self.optimizers:  # also where no master is separate yet: parameters that join may have such ones
            attach_zero_grad(self._model, self._grads, peek)
            self._cleanup.callback(detach_zero_grad, self._model)
        return self.optimizers

    def adopt_joined(self) -> None:
        self._adoption.adopt_joined()

    def showing_model(self) -> AbstractContextManager[None]:
        """Return a region where groups of optimizers have the model's own parameters; those that join are adopted."""
        return self._adoption.showing_model()

    def place_state(self, optimizer: Optimizer) -> None:
        self._adoption.place_state(optimizer)

    @property
    def num_received(self) -> int:
        """Gradients received so far, on which stochastic rounding depends: a checkpoint needs it."""
        return self._grads.num_received

    @num_received.setter
    def num_received(self, value: int) -> None:
        self._grads.num_received = value

    def start_forward(self) -> None:
        self._grads.start_forward()
        self._updates.show_writes()

    def start_backward(self) -> None:
        """Forget what a failed backward left behind, and free what the forward did in the C library's heap."""
        self._grads.start_backward()
        self._trim_heap()

    def check_backward(self, options: dict[str, Any]) -> None:
        """Refuse options of ``loss.backward()`` that would leave out weights, before it runs."""
        inputs = options.get("inputs")
        if self._streamer is not None and inputs is not None:
            # a generator can be read once
            options["inputs"] = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
            self._streamer.refuse_inputs(options["inputs"])

    def finish_backward(self, *, is_last: bool = False) -> None:
        """Return when the gradients of the last backward are where the optimizer reads them, if it does so next."""
        self._grads.finish()
        if is_last:  # no backward of this step comes any more; a step with a closure says so itself
            self._grads.end_step()
        self._trim_heap()

    def _trim_heap(self) -> None:
        if self._heap is not None:
            self._heap.trim()

    def end_step(self) -> None:
        if self.on_ssd is not None:
            self.on_ssd.note_pace(self.guard.num_steps // max(1, len(self.optimizers)))
        self.code_has_run()

    def code_has_run(self) -> None:
        """Note that code of the user's has run, which may have written weights in a way that leaves no trace."""
        if self._loop.writes_unseen and self._streamer is not None:
            self._streamer.forget()  # someone may have written through `.data`

    def wait_for_updates(self) -> None:
        """Return when weights, masters and optimizer state are those of the last step, and on the host."""
        self._updates.wait()
        self._grads.release_units()

    def finished(self) -> FinishedRun:
        return FinishedRun(self.masters, self.num_received)

    def close(self, *, after_error: bool = False) -> None:
        """Free everything but weights and optimizer state. Idempotent. See [Note: Order of life]."""
        self._ended_by_error = after_error
        with self._cleanup as cleanup:
            cleanup.callback(self._updates.close, after_error=after_error)
            cleanup.callback(self._end, self._grads.release_units)  # first: a backward that failed may still run

    def _end(self, close: Callable[[], None]) -> None:
        """Call `close`. After an error that ended the run, users see that one, and errors of ours are logged."""
        try:
            close()
        except LightningCXLError as error:
            if not self._ended_by_error:
                raise
            log.warning(f"the error that ended the run was not the only one: {error}")

    def report(self) -> dict[str, Any]:
        kept = self._unplaced
        # read without waiting: updates may be running, or may have failed
        parameters = list(peek(self._model))
        notes = [f"{len(kept)} parameters stay in ordinary memory, e.g. `{kept[0]}` (shared storage)"] if kept else []
        return {
            **self._planned,
            "num_parameters": sum(map(quantised.numel, parameters)),
            "num_trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "units": list(self.units),
            "streamed": {} if self._streamer is None else self._streamer.stats(),
            "optimizers": [step.describe_optimizer(optimizer) for optimizer in self.optimizers],
            "notes": notes,
        }
