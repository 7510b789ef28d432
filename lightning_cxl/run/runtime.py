"""`OffloadRuntime`: builds and owns everything one training run needs, and tears it down. Knows no framework.

[Note: Order of life]
Built: topology, memory, then (with the model) placements, engine, weights, gradients, activations, then optimizers.
Torn down in the opposite order by `close`, which may be called at any moment, any number of times. What belongs to the
user outlives it: the weights stay where they are, inside the model, and optimizer state stays with the optimizers (as
with plain Lightning, so that a checkpoint can still be saved after a run); both are freed when those objects are.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cxl.config import OffloadConfig
from lightning_cxl.gradients.overflow import OverflowGuard
from lightning_cxl.gradients.sink import GradientSink
from lightning_cxl.gradients.zero_grad import attach_zero_grad, detach_zero_grad
from lightning_cxl.inventory.held import gradients_at_once
from lightning_cxl.inventory.sensitive import sensitive_parameters
from lightning_cxl.inventory.wanted import wanted_tensors
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.heap import HeapTrimmer
from lightning_cxl.memory.hook import HostAllocationMode
from lightning_cxl.memory.lineage import ParameterOwners
from lightning_cxl.memory.scope import activate
from lightning_cxl.memory.stacks import HostMemory
from lightning_cxl.optim.masters import HostParameter, MasterWeights
from lightning_cxl.optim.meter import meter_of_run
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.placement.policy import PlacementPolicy
from lightning_cxl.planning.ahead import RunPlanner
from lightning_cxl.planning.placements import ModelPlacements
from lightning_cxl.planning.policies.api import PlanningPolicy
from lightning_cxl.run.placed_memory import PlacedMemory
from lightning_cxl.run.report import Plan
from lightning_cxl.run.residence import Residence, count_parameters
from lightning_cxl.streaming.activations import DEFAULT_MIN_BYTES, ActivationOffload
from lightning_cxl.streaming.units import NamedUnits, find_units
from lightning_cxl.transfer.engine import TransferEngine, make_engine
from lightning_cxl.updates.adopt import Adoption, AdoptionOptions, describe_optimizer
from lightning_cxl.updates.idle_options import warn_of_idle_options
from lightning_cxl.updates.unit_updates import UnitUpdates

log = logging.getLogger(__name__)


class OffloadRuntime:
    """One run's host memory, placements, gradients, activations and optimizers.

    Args:
        config: the user's choices.
        device: where the model computes.
        topology: this machine's tiers; detected when None.
        policy: places what no decorator or rule asks for; the one that ``config.policy`` names when None.
        engine: copies between host and device; the device's own when None. Closed with the run.
    """

    min_activation_bytes = DEFAULT_MIN_BYTES
    """Inputs of units smaller than this stay where they are."""

    guard: OverflowGuard
    """What keeps optimizers from gradients that are not finite; made by `setup_model`."""

    def __init__(
        self,
        config: OffloadConfig,
        device: torch.device,
        topology: Topology | None = None,
        policy: PlacementPolicy | PlanningPolicy | None = None,
        engine: TransferEngine | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self.topology = topology or Topology.detect(on_missing_tier=config.on_missing_tier)
        pin = device.type != "cpu" if config.pin_memory == "auto" else bool(config.pin_memory)
        self.memory = HostMemory(self.topology, budgets=config.budgets(), on_tier_full=config.on_tier_full, pin=pin)
        self._heap: HeapTrimmer | None = None  # only where the user trades time for memory anyway
        self._owners = ParameterOwners()
        self._planner = RunPlanner(config, device, self.memory, policy, self._owners)
        self.placer = self._planner.placer
        self.engine = make_engine(device) if engine is None else engine
        self.meter = meter_of_run(config, self.engine.computes_on_host)
        self.accumulates = False
        """Whether several micro-batches are added up before a step: what is planned then holds their sums."""
        self.needs_whole_step: str | None = None
        """What may call a step off, or look at gradients, once its closure runs."""
        self.gradients_are_read = True  # by someone, between the micro-batches of a step
        self.weights_may_change_unseen = False  # between steps, in a way that leaves no trace
        self.plan = Plan()
        self.units: tuple[str, ...] = ()
        self.optimizers: list[Optimizer] = []
        self._model: nn.Module | None = None
        self._placements: ModelPlacements | None = None
        self._placed: PlacedMemory | None = None
        self._residence: Residence | None = None
        self._masters: MasterWeights | None = None
        self._grads: GradientSink | None = None
        self._adoption: Adoption | None = None
        self._activations: ActivationOffload | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._updates: UnitUpdates | None = None
        self._closed = False

    def allocation(self, role: TensorRole | None = None) -> AbstractContextManager[Any]:
        """Return a region in which torch's host tensors are placed by policy, decorators, or as `role`."""
        return HostAllocationMode(self.memory, self.placer, role=role)

    def activate(self) -> AbstractContextManager[Any]:
        """Return a region in which `lightning_cxl.empty` and `host_allocation` use this run's memory and budgets."""
        return activate(self.memory, self.placer)

    def plan_ahead(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> ModelPlacements:
        """Decide and return where everything goes, before anything is allocated. See [Note: Planning a run].

        Args:
            model: as it is now.
            optimizers: as the user made them on it; empty where nothing is trained.

        Raises:
            ConfigError: rules or decorators that cannot be honoured.
            TierFullError: it does not fit.
        """
        self._placements = self._planner.plan(
            model, optimizers, self.engine.computes_on_host, self.accumulates, self.needs_whole_step
        )
        return self._placements

    def setup_model(self, model: nn.Module) -> None:
        """Place the weights and attach activation offload.

        Raises:
            ConfigError: rules or decorators that cannot be honoured.
            TierFullError: the weights do not fit.
        """
        config, placements = self.config, self._placements or self.plan_ahead(model, [])
        units = find_units(model, config.units) if config.activation_offload else []
        if config.activation_offload and not units:
            log.info(
                "no repeated blocks found: activations are not offloaded; name the blocks in `units` if there are some"
            )
        self._model = model
        self._heap = HeapTrimmer() if units else None
        self.units = tuple(name for name, _ in units)
        self._placed = PlacedMemory(self.memory, placements, self.plan, config.on_tier_full, self._heap, self.units)
        self._masters = MasterWeights(placements.names, self._placed.like, self.engine)
        self.guard = OverflowGuard(config.on_overflow, config.max_overflows, self._masters.name_of, self.meter)
        self._residence = Residence(model, self._placed, self.engine, units if self.streams_weights else [])
        placements.read(model)  # some modules make new parameters when they move
        if self._residence.units and self.config.overlaps_step(self.engine.computes_on_host):
            self._worker = ThreadPoolExecutor(1, "lightning_cxl", self.engine.use_in_this_thread)
        self._grads = GradientSink(
            self.engine,
            self._placed.like,
            self.meter,
            half_sums=self.config.accumulate == "bf16",
            streamed={id(place.parameter): unit for unit in self._residence.units for place in unit.places},
            bring_home=self._residence.bring_home,
            worker=self._worker,
            allocate_all=self._placed.like_all,
        )
        for unit in self._residence.units:
            unit.on_look = self._grads.look
        if units:
            self._attach(units)

    @property
    def streams_weights(self) -> bool:
        """Whether the weights of units stream, if the model has units."""
        return self.config.streams_weights(self.engine.computes_on_host)

    def _attach(self, units: NamedUnits) -> None:
        assert self._placed is not None and self._residence is not None and self._grads is not None
        activations = ActivationOffload(
            self.engine,
            self._placed.activation,
            min_bytes=self.min_activation_bytes,
            keep_in_place=self._placed.activation_in_place,
        )
        self._activations = activations
        streamer = self._residence.stream(lambda: activations.phase)
        activations.attach(units, self._model)
        if streamer is not None:
            streamer.on_recompute = self._grads.finish_at_the_end
        if streamer is not None and self._worker is not None:
            self._updates = UnitUpdates(
                self._residence.units, self._worker, self.masters, self._grads, streamer.fetch_ahead
            )
            streamer.on_left = self._updates.unit_is_over

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Return the optimizers that take the place of the user's, in the same order. See [Note: Adoption].

        Raises:
            TierFullError: gradients or optimizer state do not fit; nothing has been swapped then.
            UnsupportedError: an Adam option that `CPUAdam` does not have.
        """
        assert self._masters is not None and self._grads is not None, "setup_model comes first"
        assert self._model is not None and self._placed is not None and self._residence is not None
        self._adoption = Adoption(
            self._masters,
            self._grads,
            AdoptionOptions(
                use_cpu_adam=self.config.cpu_adam,
                num_threads=self.meter.num_threads,
                state=self.config.state,
                master=self.config.master,
                is_sensitive=sensitive_parameters(self._model).__contains__,
                allocate_state=self._placed.flat,
                scope=partial(self.allocation, TensorRole.MOMENTUM),
                adopted=self._adopted,
                place_state=self.rehome_state,
                guard=self.guard,
                meter=self.meter,
                may_write=self._residence.wait_for_readers,
                overlap=self._updates,
            ),
        )
        self._adoption.forms.consider(optimizers)
        wanted = wanted_tensors(optimizers, self._adoption.forms, self.config, accumulates=self.accumulates)
        early = self._updates is not None and self._updates.allow_in_backward(self.needs_whole_step, optimizers)
        if self._updates is not None and early and not self.accumulates:
            self._grads.reserves_streamed, wanted = False, gradients_at_once(wanted, self._residence.unit_of)
        self._placed.reserve(wanted)
        try:
            self.optimizers = [self._adoption.adopt(optimizer) for optimizer in optimizers]
        except BaseException:
            self._adoption.release()
            raise
        warn_of_idle_options(self.optimizers, self._masters, self.config)
        if self._masters.has_separate:
            attach_zero_grad(self._model, self._grads)
        return self.optimizers

    def adopt_joined(self) -> None:
        """Adopt parameters that someone has put into the optimizers' groups. See [Note: Adoption]."""
        if self._adoption is not None:
            self._adoption.adopt_joined()

    def _adopted(self, hosts: list[HostParameter]) -> None:
        assert self._placed is not None
        for host in hosts:
            self._owners.add(host.master, self._placed.placements.spec_of(host.compute))

    def rehome_state(self, optimizer: Optimizer) -> None:
        """Move optimizer state in ordinary memory (loaded, or made too early) to where the policy wants it."""
        assert self._placed is not None
        self._placed.rehome(optimizer, self.masters.compute_of)

    @property
    def num_received(self) -> int:
        """Gradients received so far, on which stochastic rounding depends: a checkpoint needs it."""
        return 0 if self._grads is None else self._grads.num_received

    @num_received.setter
    def num_received(self, value: int) -> None:
        assert self._grads is not None, "setup_model comes first"
        self._grads.num_received = value

    def start_backward(self) -> None:
        """Forget what a failed backward left behind, and free what the forward did in the C library's heap."""
        if self._grads is not None and self._placed is not None:
            self._placed.forward_is_over()
            self._grads.start_backward()
        if self._updates is not None:
            self._updates.begin_backward()
        self._trim_heap()

    def finish_backward(self) -> None:
        """Return when the gradients of the last backward are where the optimizer reads them, if it does so next."""
        if self._grads is not None:
            self._grads.finish()
        self._trim_heap()

    def _trim_heap(self) -> None:
        if self._heap is not None:
            self._heap.trim()

    def wait_for_updates(self) -> None:
        """Return when weights, masters and optimizer state are those of the last step, and on the host."""
        if self._updates is not None:
            self._updates.wait()
        if self._residence is not None:
            self._residence.bring_home()

    def forget_copies(self) -> None:
        """Let weights that stream be copied again: someone may write to them through `.data`, which leaves no trace."""
        if self._residence is not None:
            self._residence.forget_copies()

    def end_step(self) -> None:
        """Tell the activation arenas that a training step is over."""
        self.memory.end_step()
        if self._grads is not None:
            self._grads.is_read_next = self.gradients_are_read
        if self.weights_may_change_unseen:
            self.forget_copies()

    @property
    def masters(self) -> MasterWeights:
        """The master weights of this run; `wait_for_updates` before their values are read."""
        assert self._masters is not None, "setup_model comes first"
        return self._masters

    def close(self, *, after_error: bool = False) -> None:
        """Free everything but weights and optimizer state. Idempotent. See [Note: Order of life].

        Args:
            after_error: an error has ended the run; those of updates are not raised any more.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as cleanup:  # last in, first out; one that fails does not keep the others from running
            cleanup.callback(self.memory.close)
            cleanup.callback(self.engine.close)
            if self._grads is not None:
                cleanup.callback(self._grads.close)
            if self._residence is not None:
                cleanup.callback(self._residence.close)
            if self._activations is not None:
                cleanup.callback(self._activations.detach)
            if self._adoption is not None:
                cleanup.callback(self._adoption.release)
            if self._worker is not None:
                cleanup.callback(self._worker.shutdown)
            if self._updates is not None:
                cleanup.callback(self._updates.close, after_error=after_error)
            if self._model is not None:
                cleanup.callback(detach_zero_grad, self._model)

    def report(self, state: str = "running") -> dict[str, Any]:
        """Return measured and planned bytes and what runs, as JSON-able data."""
        residence = self._residence
        return {
            "state": state,
            "device": str(self.device),
            **self.memory.stats(),
            "policy": self._planner.policy_name,
            "planned_roles": self.plan.roles(),
            "reasons": self.plan.reasons(),
            **count_parameters(self._model),
            "units": list(self.units),
            "streamed": {} if residence is None else residence.stats(),
            "optimizers": [describe_optimizer(optimizer) for optimizer in self.optimizers],
            "notes": [*self.topology.notes, *self.memory.notes(), *(() if residence is None else residence.notes())],
        }
