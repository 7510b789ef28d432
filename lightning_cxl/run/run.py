"""`Run`: one training run, built from inventory and decision. Knows no framework.

[Note: Order of life]
Built: the host (topology, memory, policy, engine); then, with the model, the inventory and the decision; then the run
places the weights and builds what receives gradients, streams weights and offloads inputs; then it adopts optimizers.
Torn down in the opposite order by `Run.close` and `Host.close`, which may be called at any moment, any number of times.
What belongs to the user outlives both: the weights stay where they are, inside the model, and optimizer state stays
with the optimizers (as with plain Lightning, so that a checkpoint can still be saved after a run); both are freed when
those objects are. What a later checkpoint needs of a run is in its `FinishedRun`.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from lightning_cxl.errors import LightningCXLError
from lightning_cxl.gradients.guard import OverflowGuard
from lightning_cxl.gradients.meter import meter_of_run
from lightning_cxl.gradients.offload import (
    GradientOffload,
    attach_zero_grad,
    detach_zero_grad,
)
from lightning_cxl.inventory.inventory import Inventory, precisions_of
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.memory.hook import activate
from lightning_cxl.memory.host_memory import HeapTrimmer
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.planning.decide import Plan
from lightning_cxl.run.host import Host
from lightning_cxl.run.placed_memory import PlacedMemory
from lightning_cxl.run.residence import Residence, count_parameters
from lightning_cxl.run.state_on_ssd import StateOnSsd
from lightning_cxl.ssd_options import SSD
from lightning_cxl.streaming.activations import DEFAULT_MIN_BYTES, ActivationOffload
from lightning_cxl.streaming.unit_weights import peek
from lightning_cxl.updates.adoption import Adoption, describe_optimizer
from lightning_cxl.updates.step import UnitUpdates, WholeUpdates

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FinishedRun:
    """What a checkpoint needs of a run that is over."""

    masters: MasterWeights
    num_received: int
    """Gradients received in all."""


class Run:
    """Weights in their places, units wrapped, gradients received; optimizers are adopted by `adopt`.

    Args:
        inventory: of the model, which is changed: its weights move, its units are wrapped.
    """

    min_activation_bytes = DEFAULT_MIN_BYTES
    """Inputs of units smaller than this stay where they are."""

    def __init__(self, host: Host, inventory: Inventory, decision: Plan, loop: Loop) -> None:
        config, engine, model = host.config, host.engine, inventory.model
        if config.activation_offload and not inventory.units:
            log.info(
                "no repeated blocks found: activations are not offloaded; name the blocks in `units` if there are some"
            )
        self._host = host
        self._loop = loop
        self._ended_by_error = False
        self._model = model
        self.units = tuple(name for name, _ in inventory.units)
        self._heap = HeapTrimmer() if inventory.units else None  # only where the user trades time for memory anyway
        self._plan = decision
        self._placed = PlacedMemory(host.memory, decision, self._heap, self.units)
        self.masters = MasterWeights(decision.asked.names, self._placed.like, engine)
        """The master weights; `wait_for_updates` before their values are read."""
        self.meter = meter_of_run(config, engine.computes_on_host, trusts_versions=not loop.edits_gradients)
        self.guard = OverflowGuard(config.on_overflow, config.max_overflows, self.masters.name_of, self.meter)
        """Keeps optimizers from gradients that are not finite."""
        self.optimizers: list[Optimizer] = []
        self._placed.count_planned(inventory)
        with ExitStack() as cleanup:  # last in, first out; one that fails does not keep the others from running
            self.on_ssd = self._open_ssd(inventory, cleanup)
            """Optimizer state and weights that do not lie in memory; None where all of it does."""
            self._residence = Residence(model, self._placed, engine, inventory.streamed, inventory.gathered)
            decision.asked.read(model)  # some modules make new parameters when they move
            cleanup.callback(self._residence.close)
            units = self._residence.units
            activations = ActivationOffload(
                engine,
                self._placed.activation,
                min_bytes=self.min_activation_bytes,
                place_on_ssd=self._placed.activation_on_ssd,
            )
            streamer = self._residence.stream(lambda: activations.phase)
            overlaps = streamer is not None and inventory.overlap != "none"
            worker = ThreadPoolExecutor(1, "lightning_cxl", engine.use_in_this_thread) if overlaps else None
            self._grads = GradientOffload(
                engine,
                self._placed.like_all,
                self.meter,
                worker,
                _nothing if streamer is None else streamer.release,  # [Note: Which hooks stay]
                {id(place.parameter): unit for unit in units for place in unit.places},
                half_sums=config.accumulate == "bf16",
                reserves_streamed=inventory.reserves_all_gradients,
                are_read_early=loop.reads_gradients,
            )
            if worker is None or streamer is None:
                self._updates = WholeUpdates(units, self.masters)
            else:
                in_backward = inventory.overlap == "backward"
                self._updates = UnitUpdates(units, self.masters, worker, self._grads, streamer, in_backward=in_backward)
            cleanup.callback(self._grads.close)
            if streamer is not None:
                streamer.attach(self._grads)
            cleanup.callback(activations.detach)
            activations.attach(inventory.units, model)
            self._precisions = precisions_of(model, config)
            self._adoption = Adoption(
                self._precisions,
                self.masters,
                self._grads,
                self.guard,
                self._updates,
                self._placed,
                self.meter,
                None if self.on_ssd is None else self.on_ssd.state,
            )
            cleanup.callback(self._end, self._adoption.release)
            if worker is not None:
                cleanup.callback(worker.shutdown)
            self._cleanup = cleanup.pop_all()

    def _open_ssd(self, inventory: Inventory, cleanup: ExitStack) -> StateOnSsd | None:
        options, records = self._host.ssd_options, inventory.ssd_records
        if options is None or not records:
            return None
        budget_bytes = self._host.topology.tier(SSD).capacity_bytes
        on_ssd = StateOnSsd(options, budget_bytes, records, self._placed.slots, self._host.engine)
        cleanup.callback(self._end, on_ssd.close)
        self._placed.on_ssd = on_ssd
        return on_ssd

    def activate(self) -> AbstractContextManager[Any]:
        """Return a region in which `lightning_cxl.empty` and `host_allocation` follow this run's decision."""
        return activate(self._host.memory, self._placed.placements.placer)

    # -- optimizers --------------------------------------------------------------------------------------------------

    def adopt(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Return the optimizers that take the place of the user's, in the same order. See [Note: Adoption]."""
        if self.on_ssd is not None:
            self.on_ssd.refuse_state_of_earlier_run(optimizers)
        self._host.memory.trim()  # what weights that have moved have left
        self._precisions.consider(optimizers)
        try:
            self.optimizers = [self._adoption.adopt(optimizer) for optimizer in optimizers]
        except BaseException:
            self._ended_by_error = True
            self._end(self._adoption.release)
            raise
        if self.optimizers:  # also where no master is separate yet: parameters that join may have such ones
            attach_zero_grad(self._model, self._grads, peek)
            self._cleanup.callback(detach_zero_grad, self._model)
        return self.optimizers

    def adopt_joined(self) -> None:
        """Adopt parameters that someone has put into the optimizers' groups. See [Note: Adoption]."""
        self._adoption.adopt_joined()

    def rehome_state(self, optimizer: Optimizer) -> None:
        """Move optimizer state in ordinary memory that was loaded to where the policy wants it."""
        self._adoption.rehome_state(optimizer)

    # -- steps -------------------------------------------------------------------------------------------------------

    @property
    def num_received(self) -> int:
        """Gradients received so far, on which stochastic rounding depends: a checkpoint needs it."""
        return self._grads.num_received

    @num_received.setter
    def num_received(self, value: int) -> None:
        self._grads.num_received = value

    def start_backward(self) -> None:
        """Forget what a failed backward left behind, and free what the forward did in the C library's heap."""
        self._placed.forward_is_over()
        self._grads.start_backward()
        self._trim_heap()

    def finish_backward(self, *, is_last: bool = False) -> None:
        """Return when the gradients of the last backward are where the optimizer reads them, if it does so next.

        Args:
            is_last: no backward of this step comes any more. A step with a closure says so itself.
        """
        self._grads.finish()
        if is_last:
            self._grads.end_step()
        self._trim_heap()

    def _trim_heap(self) -> None:
        if self._heap is not None:
            self._heap.trim()

    def end_step(self) -> None:
        """Note that a training step is over."""
        if self._placed.on_ssd is not None:
            self._placed.on_ssd.note_pace(self.guard.num_steps // max(1, len(self.optimizers)))
        self.code_has_run()

    def code_has_run(self) -> None:
        """Note that code of the user's has run, which may have written weights in a way that leaves no trace."""
        if self._loop.writes_unseen:
            self.forget_copies()

    def wait_for_updates(self) -> None:
        """Return when weights, masters and optimizer state are those of the last step, and on the host."""
        self._updates.wait()
        self._grads.release_units()

    def forget_copies(self) -> None:
        """Let weights that stream be copied again: someone may write to them through `.data`, which leaves no trace."""
        self._residence.forget_copies()

    # -- the end -----------------------------------------------------------------------------------------------------

    def finished(self) -> FinishedRun:
        """Return what a checkpoint needs when the run is over."""
        return FinishedRun(self.masters, self.num_received)

    def close(self, *, after_error: bool = False) -> None:
        """Free everything but weights and optimizer state. Idempotent. See [Note: Order of life].

        Args:
            after_error: an error has ended the run; those of updates and of state on SSD are not raised any more.
        """
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

    def report(self, state: str = "running") -> dict[str, Any]:
        """Return measured and planned bytes and what runs, as JSON-able data."""
        report = self._host.report(state, None if self.on_ssd is None else self.on_ssd.report_row())
        return {
            **report,
            "planned_roles": self._plan.roles(),
            "reasons": self._plan.reasons(),
            **count_parameters(self._model),
            "units": list(self.units),
            "streamed": self._residence.stats(),
            "optimizers": [describe_optimizer(optimizer) for optimizer in self.optimizers],
            "notes": [*report["notes"], *self._residence.notes()],
        }


def _nothing() -> None:
    """No weights stream, so none have to be brought home."""
