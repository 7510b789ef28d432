"""The step of an adopted optimizer: at once, or unit after unit behind what the device does."""

import logging
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import LBFGS, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_cxl.devices import TransferEngine
from lightning_cxl.gradients.guard import GradientMeter, OverflowGuard
from lightning_cxl.gradients.offload import GradientOffload, HostWorker
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.optim.cpu_adam import AdamStep, CPUAdam, Precisions, Update, written_by
from lightning_cxl.optim.masters import MasterWeights, WeightPair, is_on_host
from lightning_cxl.optim.parameter_state import AllocateState, AwaitedParams, plain
from lightning_cxl.optim.swapped_state import StateSwapper
from lightning_cxl.sharding.host_shard import ShardedUnit
from lightning_cxl.shards import is_sharded, local, shard_of, sharded_like
from lightning_cxl.streaming.unit_weights import ParamStreamer, UnitWeights
from lightning_cxl.streaming.units import Compiler, StandIn, call_under
from lightning_cxl.timing import timed
from lightning_cxl.torch_private import (
    between_hooks,
    is_only_gradient,
    keeps_mark,
    mark_as_called,
    orthogonalising_by,
    step_hooks,
)

# `Updates`: all parameters at once, or streamed units one after the other, behind what the device does.
#
# [Note: Overlapped updates]
# One worker thread does what the host does with gradients: it adds and measures them as they land (`GradientOffload`)
# and runs the update of one unit after the other. There are two schedules:
#
# * Behind the next forward, always possible: at the time of the step all gradients are there, checked and clipped. All
#   updates run on the worker in the order of the forward, and the step returns.
# * Behind the backward as well, if nothing can call the step off and nobody looks at gradients (`in_backward`): a unit
#   is updated from the end of its backward on, with the gradients that have been started on their way, which never
#   become ``p.grad``. The worker takes the unit that the next forward needs first, so where it is slower than the
#   backward, the rest runs behind that forward. If memory has room for gradients of a few units only, a backward that
#   is too far ahead waits. Masters of what stays on the device (embedding, head) come first of all.
#
# What stays on the device gets its new values when the step is over, from the worker, behind all that the device was
# asked for before. The forward of its module waits for them (`_ResidentForward`), and so does any other use of it
# ([Note: Compute and master weights]). A parameter of a module that contains units is written by the step itself. So is
# one whose memory another tensor reaches (``p.data`` or ``p.detach()`` that were kept): past it nobody waits.
#
# A step reads hyper-parameters when it begins, so schedulers may go on. Versions of the weights go up when an update is
# started, by the thread that starts it: copies on the device are stale from then on. Until it is done the unit is
# *updating*: its forward waits (`ParamStreamer.enter`), whoever looks at its parameters through their modules waits
# ([Note: Awaited parameters]), and so does whoever looks at the optimizer's state. When it is done, the worker has the
# unit fetched if it is expected next. An error in an update is raised where it is waited for.
#
# With several processes, and a device apart, a unit is what FSDP2 gathers together (`ShardedUnit`): its backward is
# over when all of its gradients have come, and its gather waits. What the root gathers is a unit, too, so embedding and
# head are updated first.
#
# A unit that ran more than once since the step began, or part of which the worker cannot update, is left to the end of
# the backward. An exception in the middle of a backward leaves a step half made where updates ran behind it.


log = logging.getLogger(__name__)

MAX_UNITS_IN_FLIGHT = 3
"""Units whose gradients are on the host and wait for their update: one is updated, one lands, one is slack."""


class Updates:
    """Makes updates when their step asks for them; those of streamed units run behind, if there is a worker.

    See [Note: Overlapped updates].
    """

    def __init__(
        self,
        units: Sequence[UnitWeights | ShardedUnit],
        masters: MasterWeights,
        grads: GradientOffload,
        streamer: ParamStreamer | None,
        worker: HostWorker | None,
        *,
        in_backward: bool,
        max_in_flight: int,
        guard: OverflowGuard,
        parameters: Iterable[Parameter],  # in the order of the forward, as far as that is known
        awaited: Mapping[int, int],  # numbers of stand-ins whose forward waits, by parameter id
    ) -> None:
        self._units = units
        self._masters = masters
        self._unit_of = {id(parameter): unit for unit in units for parameter in unit.parameters}
        self._worker = worker
        self._grads = grads
        if worker is not None:
            grads.updates = self
        self._streamer = streamer
        self._in_backward = in_backward
        self._guard = guard
        self._max_in_flight = max_in_flight
        self._order = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._awaited = awaited
        self._behind: list[WeightPair] = []  # on the device, whose updates run or ran behind
        self._optimizer: CPUAdam | None = None  # whose closure runs, if updates may run behind its backward
        self._step: AdamStep | None = None  # of that closure, once a unit has been updated
        self._started: list[Future[None]] = []
        self._is_last_backward = False  # of that closure
        self._residents: list[tuple[WeightPair, Future[None]]] = []  # updated in this backward; the device has old ones
        self._seen: dict[WeightPair, int] = {}  # versions of separate masters at the end of the last step

    # -- what a step asks for, in this order

    def begin(self, optimizer: Optimizer) -> None:
        """Learn that a step of `optimizer` begins, before its closure is evaluated."""
        if self._worker is None:
            return
        self._step = None
        self._is_last_backward = False
        if not isinstance(optimizer, CPUAdam):
            self.give_up()
            self.wait()  # it may read and write anything, at any time
            return
        self._optimizer = optimizer if self._in_backward and not has_step_hooks(optimizer) else None
        for unit in self._units:
            unit.begin_step()

    @property
    def has_begun(self) -> bool:
        """Whether parts of the step whose closure runs are updated, or will be."""
        return self._step is not None

    def give_up(self) -> None:
        """Learn that the closure has failed."""
        self._optimizer = self._step = None
        with suppress(Exception):  # that of the closure is raised
            self._end_residents()

    def prepare(self) -> None:
        """Return when the masters may be written, and have what others wrote into the compute weights."""
        for unit in self._units:
            unit.wait_for_readers()
        self._settle_residents()
        self._masters.wait()
        self._masters.absorb_changes()

    def update(self, optimizer: Optimizer, step: Callable[[], Any], loss: Any) -> Any:
        """Update the parameters that have gradients: those of units on the worker, the rest now."""
        if self._worker is None:
            return step()
        if not isinstance(optimizer, CPUAdam) or has_step_hooks(optimizer):  # hooks may read anything
            self.wait()
            return step()
        self._update(optimizer)
        return loss

    @torch.no_grad()
    def _update(self, optimizer: CPUAdam) -> None:
        if self._step is not None:
            self._step.check_unchanged()
        step = AdamStep(optimizer) if self._step is None else self._step
        self._optimizer = self._step = None
        updates = step.collect()
        optimizer.drop_stale_scale()
        parts: dict[int, list[Update]] = {}
        residents: dict[int, list[tuple[WeightPair, Update]]] = {}
        now: list[Update] = []
        for each in updates:
            pair = self._masters.find(each.written[0])
            unit = None if pair is None else self._unit_of.get(id(pair.compute))
            if pair is None or not self._is_unseen(pair, each):
                now.append(each)
            elif unit is not None and self._is_for_worker(pair):
                parts.setdefault(id(unit), []).append(each)
            elif self._may_be_late(pair):
                residents.setdefault(self._awaited[id(pair.compute)], []).append((pair, each))
            else:
                now.append(each)
        step.apply(now, optimizer.grad_scale)
        torch.autograd.graph.increment_version(written_by(now))
        for group in residents.values():  # before units: the worker begins at once, and the embedding is needed first
            part = [each for _, each in group]
            torch.autograd.graph.increment_version(written_by(part))
            job = partial(step.apply, part, optimizer.grad_scale)
            self._start_residents([pair for pair, _ in group], job, self._order[id(group[0][0].compute)])
        for unit in self._units:
            if id(unit) in parts:
                part = parts[id(unit)]
                self.start(unit, written_by(part), partial(step.apply, part, optimizer.grad_scale))
        optimizer.grad_scale = 1.0
        self._write_back_residents()

    def write_back(self, optimizer: Optimizer, updated: Sequence[torch.Tensor]) -> None:
        is_ours = isinstance(optimizer, CPUAdam)
        behind = {id(pair.master) for pair in self._behind if pair.is_updating}
        self._masters.write_back([each for each in updated if id(each) not in behind], kernel_wrote=is_ours)
        if self._worker is None or not is_ours:
            self._masters.wait()  # else whoever gets at the masters waits

    def write_back_changes(self, versions: Mapping[torch.Tensor, int]) -> None:
        self._masters.write_back_changes(versions)
        self._masters.wait()

    # -- what others ask

    def note_masters(self) -> None:
        self._seen = {pair: pair.master._version for pair in self._masters if not pair.is_shared}

    def show_writes(self) -> None:
        """Give the model what others wrote into masters since the last step, as the first half of SAM's does."""
        changed = [pair for pair, version in self._seen.items() if pair.master._version != version]
        if not changed or self.has_begun:
            return
        written: dict[torch.Tensor, int] = {pair.master: -1 for pair in changed if not pair.may_be_written}
        self.wait()
        for unit in self._units:
            unit.wait_for_readers()
        self.write_back_changes(written)
        self.note_masters()

    def wait(self) -> None:
        for unit in self._units:
            unit.settle()
        wait([update for _, update in self._residents])  # an error is raised by the step
        self._settle_residents()
        self._masters.wait()

    def close(self, *, after_error: bool = False) -> None:
        """Return when every update is done, and keep none: an error that stays behind keeps what its frames hold.

        Where an error has ended the run, those of updates are logged: raised, they would end the teardown for it.
        """
        self._optimizer = None
        self._started.clear()
        try:
            with ExitStack() as waits:
                waits.callback(self._masters.wait)
                waits.callback(self._end_residents)
                for settle in [each.settle for each in self._units] + [each.settle for each in self._behind]:
                    waits.callback(settle)
                self._behind.clear()
        except Exception as error:
            if not after_error:
                raise
            log.warning(f"the error that ended the run was not the only one. An update failed: {error!r}")

    # -- what runs behind

    def begin_backward(self) -> None:
        self._is_last_backward = self._optimizer is not None

    def _end_residents(self) -> None:
        """Write back the masters whose updates run or ran; raise the first error of those that failed."""
        updated, self._residents = self._residents, []
        errors = [update.exception() for _, update in updated]  # waits for each
        self._masters.write_back([pair.master for (pair, _), error in zip(updated, errors, strict=True) if not error])
        for error in filter(None, errors):
            raise error

    def _write_back_residents(self) -> None:
        """Let the worker write back what was updated in the backward; what no forward waits for, at once."""
        behind = [(pair, update) for pair, update in self._residents if self._may_be_late(pair)]
        self._residents = [each for each in self._residents if each not in behind]

        def raise_errors() -> None:
            for _, update in behind:
                update.result()  # done: the worker had them first

        if behind:
            self._start_residents([pair for pair, _ in behind], raise_errors, -1)
        self._end_residents()

    def _may_be_late(self, pair: WeightPair) -> bool:
        """Whether the device may get new weights after the step: whoever uses them is known, and waits."""
        return not pair.is_on_device and id(pair.compute) in self._awaited and pair.may_be_late

    def _start_residents(self, pairs: Sequence[WeightPair], job: Callable[[], None], order: int) -> None:
        """Let a job that updates masters run on the worker; the device gets the new weights after it."""
        assert self._worker is not None
        update: Future[None] = Future()
        write = self._masters.writing_back(pairs, update)

        def run() -> None:
            job()
            write()

        self._worker.update(order, run, update)
        self._behind += pairs

    def _settle_residents(self) -> None:
        while self._behind:
            self._behind.pop().settle()

    def wait_for(self, parameters: Iterable[Parameter]) -> None:
        """Have the device wait for new values of parameters that stay there, before it computes with them."""
        if self._behind:
            ids = {id(parameter) for parameter in parameters}
            for pair in self._behind:
                if id(pair.compute) in ids:
                    pair.settle()

    def unit_is_over(self, unit: UnitWeights | ShardedUnit) -> None:
        if self._optimizer is None or not self._is_last_backward or unit.runs_again:
            return
        found = map(self._masters.find, unit.parameters)
        pairs = self._grads.hand_over(pair for pair in found if pair is not None and self._is_for_worker(pair))
        if not pairs:
            return
        written: list[torch.Tensor] = [pair.compute for pair in pairs]
        self.start(unit, written, self._updating(self._optimizer, pairs))
        self._masters.write_back([pair.master for pair in pairs], kernel_wrote=True)
        while sum(not each.done() for each in self._started) > self._max_in_flight:
            with self._grads.engine.stall("stall_update_s", "wait for an update"):
                wait([each for each in self._started if not each.done()], return_when=FIRST_COMPLETED)

    def resident_has_come(self, pair: WeightPair) -> None:
        """Start the update of a master whose compute weights stay on the device, if it may start now.

        They get the new values at the end of the step: a recompute may read them until then.
        """
        if self._optimizer is None or not self._is_last_backward:
            return
        pair.settle()
        if pair.may_be_written:
            return
        self._grads.hand_over([pair])  # a gradient that has landed was computed with what the master was copied to
        torch.autograd.graph.increment_version([pair.master])
        update: Future[None] = Future()
        self._residents.append((pair, update))
        assert self._worker is not None
        self._worker.update(-1, self._updating(self._optimizer, [pair]), update)  # first of all: the step waits for it

    def _updating(self, optimizer: CPUAdam, pairs: list[WeightPair]) -> Callable[[], None]:
        if self._step is None:
            self._step = AdamStep(optimizer)
        return partial(self._update_arrived, self._step, pairs, optimizer.grad_scale)

    def _update_arrived(self, step: AdamStep, pairs: list[WeightPair], scale: float) -> None:
        gradients: dict[torch.Tensor, torch.Tensor] = {pair.master: self._grads.take(pair) for pair in pairs}
        if self._guard.check(gradients):
            step.apply(step.collect(gradients), scale)

    def _is_unseen(self, pair: WeightPair, update: Update) -> bool:
        """Whether no other code holds the gradient: it may write to it as soon as the step has returned."""
        grad = pair.master.grad
        if grad is None or is_sharded(grad) or grad is not update.grad:
            return True  # of several processes, or a copy that the step has made
        is_ours = self._grads.is_ours(pair, grad)
        del grad
        return is_ours and is_only_gradient(update.grad)

    def _is_for_worker(self, pair: WeightPair) -> bool:
        """Whether the kernel writes the compute weights itself, so that nothing is left to do after it."""
        return pair.is_same_memory or pair.master in self._masters.kernel_weights

    def start(self, unit: UnitWeights | ShardedUnit, written: Sequence[torch.Tensor], job: Callable[[], None]) -> None:
        """Let a job that writes parameters of `unit` run on the worker; they count as written from now on."""
        self._started = [each for each in self._started if not each.done()]
        update: Future[None] = Future()
        unit.begin_update(update)  # before its versions go up: nobody may take old weights for the new ones
        torch.autograd.graph.increment_version(written)
        assert self._worker is not None
        if self._streamer is not None:
            fetch_ahead = self._streamer.fetch_ahead
            update.add_done_callback(lambda _: fetch_ahead())

        def run() -> None:
            unit.wait_for_readers()  # the end of another update may have fetched this unit before it was known as next
            job()

        self._worker.update(self._order.get(id(unit.parameters[0]), 0), run, update)
        self._started.append(update)


class _ResidentForward(StandIn):
    """Takes the place of the forward of a module that stays on the device."""

    updates: Updates

    def run(self, compiler: Compiler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.updates.wait_for(self.module.parameters())
        return call_under(compiler, self.original, args, kwargs)


def waiting_forwards(
    model: nn.Module, units: Iterable[nn.Module], streamed: Iterable[nn.Module]
) -> list[_ResidentForward]:
    """Put stand-ins on units that do not stream, and on the outermost other modules that contain no unit."""
    of_units = {id(unit) for unit in units}
    seen = {id(each) for unit in streamed for each in unit.modules()}
    found: list[_ResidentForward] = []
    for module in model.modules():
        if id(module) in seen:
            continue
        parts = {id(each) for each in module.modules()}
        if (parts - {id(module)}).isdisjoint(of_units) and any(True for _ in module.parameters()):
            found.append(_ResidentForward(module))
            seen |= parts
    return found


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether someone has put hooks around the step, of this optimizer or of all, which may look at anything."""
    return any(step_hooks(optimizer))


def why_after_backward(objection: str | None, optimizers: Sequence[Optimizer]) -> str | None:
    """Return why updates must wait for the end of the backward; None if they need not."""
    if objection is None and len(optimizers) > 1:
        return "there are several optimizers"
    if objection is None and any(map(has_step_hooks, optimizers)):
        return "there are hooks around the optimizer's step"
    return objection


# `HostStep`: what happens at a step of an adopted optimizer: gradients in, checks, update, new weights out.
#
# [Note: A step]
# 1. The optimizer's step begins: updates learn which one (`begin`), and may run behind the backward from here on.
# 2. The closure, if there is one, runs forward and backward. `CPUAdam` gets it evaluated, because its update may be
#    made in parts. Every other optimizer evaluates it by itself, when and as often as it likes.
# 3. After each evaluation gradients are complete (`GradientOffload.end_step`), nothing reads the masters any more
#    (`prepare`), and the guard looks at the gradients. Where they may not be used, the step ends there, without an
#    update. That is possible as long as the optimizer has written to none of its parameters; else the guard raises.
# 4. The update (`update`): by the optimizer's own step, or by `Updates` in parts.
# 5. The model gets the new weights (`write_back`), before hooks that follow the step, which may write to it or to the
#    masters: masters that they wrote are written back, too. State that the optimizer has made moves to its tier
#    (`place_state`).
#
# What an optimizer or the user has written to masters when another forward begins (LBFGS in its line search, SAM) is
# written back before it (`Updates.show_writes`), so that it finds the loss of these weights.


@keeps_mark
class HostStep:
    def __init__(
        self,
        optimizer: Optimizer,
        grads: GradientOffload,
        guard: OverflowGuard,
        updates: Updates,
        place_state: Callable[[Optimizer], None],
        orthogonalise: Callable[..., torch.Tensor],
    ) -> None:
        self._optimizer = optimizer
        self._grads = grads
        self._guard = guard
        self._updates = updates
        self._place_state = place_state
        self._step = optimizer.step
        self._orthogonalise = orthogonalise
        self._versions: dict[int, int] = {}  # of the parameters when the step began, by id
        self._evaluates_first = evaluates_first(optimizer)
        self._num_evaluations = 0  # of the closure of this step
        self._updating = ExitStack()

    def __call__(self, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        optimizer = self._optimizer
        if keywords and isinstance(optimizer, CPUAdam):
            raise TypeError(f"{type(optimizer).__name__}.step() takes `closure` only, not {', '.join(keywords)}")
        mark_as_called(optimizer)
        self._updates.show_writes()
        self._versions = {id(parameter): parameter._version for parameter in self._parameters()}
        self._num_evaluations = 0
        self._updates.begin(optimizer)
        try:
            if isinstance(optimizer, CPUAdam):
                return self._step_of_cpu_adam(optimizer, closure)
            return self._step_of_any_other(closure, keywords)
        except _StepLeftOut as left_out:
            return left_out.loss
        finally:
            self._updating.close()
            self._updates.note_masters()

    def _step_of_cpu_adam(self, optimizer: CPUAdam, closure: Callable[[], Any] | None) -> Any:
        try:
            loss = self._check(None) if closure is None else self._evaluate(closure)
        except BaseException:
            optimizer.grad_scale = 1.0  # was for the step that is left out
            raise
        updated = [parameter for parameter in self._parameters() if parameter.grad is not None]
        evaluated = () if closure is None else (lambda: loss,)
        step = partial(self._updates.update, optimizer, partial(self._step, *evaluated), loss)
        return self._write_back_after(step, lambda: self._updates.write_back(optimizer, updated))

    def _step_of_any_other(self, closure: Callable[[], Any] | None, keywords: dict[str, Any]) -> Any:
        for name in ("grad_scale", "found_inf"):  # of a loss scaler on a device: a fused optimizer would not wait
            value = vars(self._optimizer).get(name)
            if isinstance(value, torch.Tensor):
                setattr(self._optimizer, name, value.cpu())
        arguments = () if closure is None else (partial(self._evaluate, closure),)
        if closure is None:
            self._check(None)
        with orthogonalising_by(self._orthogonalise) if isinstance(self._optimizer, Muon) else nullcontext():
            result = self._write_back_after(partial(self._step, *arguments, **keywords), self._write_back)
        self._place_state(self._optimizer)
        return result

    def _write_back(self) -> None:
        updated = self._parameters()
        if self._evaluates_first:  # others may have written through `.data` where there is no gradient, too
            updated = [p for p in updated if p.grad is not None or self._is_written(p)]
        # fused optimizers of torch, and those of bitsandbytes, write without a trace: copies must become old
        torch.autograd.graph.increment_version([p for p in updated if not self._is_written(p)])
        self._updates.write_back(self._optimizer, updated)

    def _write_back_after(self, step: Callable[[], Any], write_back: Callable[[], None]) -> Any:
        """Make a step and write back; what hooks around it write counts, and those that follow see new weights."""
        if not has_step_hooks(self._optimizer):
            result = step()
            write_back()
            return result
        versions: dict[torch.Tensor, int] = {}

        def before_hooks() -> None:
            write_back()
            self._updates.wait()
            versions.update((parameter, parameter._version) for parameter in self._parameters())

        with between_hooks(self._optimizer, self._updates.prepare, before_hooks):
            result = step()
        if not versions:  # a step that was put on the optimizer itself calls no hooks
            write_back()
        self._updates.write_back_changes(versions)
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Return the loss, with gradients that may be used; raise `_StepLeftOut` where they may not."""
        has_written = any(map(self._is_written, self._parameters()))
        if self._num_evaluations or not self._evaluates_first:  # perhaps through `.data`, which leaves no trace
            self._updates.write_back(self._optimizer, self._parameters())
            self._updates.note_masters()
        self._num_evaluations += 1
        self._grads.begin_step()
        self._updating.close()
        try:
            with torch.enable_grad():
                loss = closure()
        except BaseException:
            self._updates.give_up()
            raise
        return self._check(loss, can_skip=not (has_written or self._updates.has_begun))

    def _check(self, loss: Any, *, can_skip: bool = True) -> Any:
        self._grads.end_step()
        self._updating.enter_context(self._grads.engine.stall("stall_update_s", "step"))
        if not isinstance(self._optimizer, CPUAdam):
            self._updating.enter_context(timed("update_s", "update"))
        self._updates.prepare()
        with_grad = [parameter for parameter in self._parameters() if parameter.grad is not None]
        if not self._guard.accepts(self._optimizer, with_grad, can_skip=can_skip):
            raise _StepLeftOut(loss)
        return loss

    def _is_written(self, parameter: torch.Tensor) -> bool:
        return self._versions.get(id(parameter)) != parameter._version

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in plain(group["params"])]


def evaluates_first(optimizer: Optimizer) -> bool:
    """Whether the optimizer's `step` is torch's own or ours: it evaluates its closure before it touches anything."""
    owner = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return owner.__module__.startswith(("torch.optim.", "lightning_cxl."))


def orthogonalise_on_device(
    engine: TransferEngine,
    stage: Callable[[int], Buffer],
    plain: Callable[..., torch.Tensor],
    matrix: torch.Tensor,
    *options: Any,
) -> torch.Tensor:
    """Return what Muon's `plain` makes of a matrix on the host: 15 products of matrices, which the device computes.

    `stage` gives pinned memory. Of a matrix that is cut over processes, each sends its shard, and they gather it there.
    """
    if engine.computes_on_host or not is_on_host(matrix):
        return plain(matrix, *options)
    shard = local(matrix)
    nbytes = max(1, shard.numel() * torch.bfloat16.itemsize)
    staging = stage(nbytes).tensor(shard.shape, torch.bfloat16).copy_(shard)  # as `plain` does first of all
    there = torch.empty_like(staging, device=engine.device)
    engine.h2d(staging, there).wait()
    found = shard_of(plain(sharded_like(there, matrix), *options), matrix)
    engine.d2h(found.contiguous(), staging).wait_host()
    return sharded_like(staging, matrix)


class _StepLeftOut(Exception):
    def __init__(self, loss: Any) -> None:
        super().__init__("the gradients of this step are not finite")
        self.loss = loss


# `Adoption`: turns the user's optimizers into host optimizers: same groups, same schedulers, same hyper-parameters.
#
# [Note: Adoption]
# Every parameter in a group is replaced by its master (the same object where compute is master). ``torch.optim.Adam``
# and ``AdamW`` themselves (not subclasses: those may do anything) become a `CPUAdam` of the same name
# (`_make_cpu_adam`). It shares the same group dicts; schedulers that pointed at the old object are pointed at the
# new one. Any other optimizer keeps its object. The ``step`` of each becomes a `HostStep` ([Note: A step]). Parameters
# added later are adopted the same way: by `add_param_group` at once, and what someone puts into a group, or into new
# groups (``optimizer.param_groups = ...``), at the next batch or before a checkpoint is written or read
# (`adopt_joined`). `Adoption.release` undoes what was put on optimizer objects.

# `CPUAdam` under the names of torch's classes, for whoever asks an adopted optimizer who it is.
#
# Learning-rate monitors, loggers and profilers name values after the optimizer's class, and user code asks with
# ``isinstance``. So what takes the place of a user's AdamW is called AdamW, and is both a `CPUAdam` and torch's AdamW.


class Adam(CPUAdam, torch.optim.Adam):
    """`CPUAdam` in the place of a ``torch.optim.Adam``."""

    adds_nothing = True


class AdamW(CPUAdam, torch.optim.AdamW):
    """`CPUAdam` in the place of a ``torch.optim.AdamW``."""

    adds_nothing = True


class Adoption:
    def __init__(
        self,
        precisions: Precisions,
        masters: MasterWeights,
        grads: GradientOffload,
        guard: OverflowGuard,
        updates: Updates,
        allocate_state: AllocateState,
        place_state: Callable[[Optimizer, Callable[[torch.Tensor], torch.Tensor]], None],
        meter: GradientMeter,
        swapper: StateSwapper | None,
        orthogonalise: Callable[..., torch.Tensor],
    ) -> None:
        self._precisions = precisions
        self._masters = masters
        self._grads = grads
        self._guard = guard
        self._updates = updates
        self._allocate = allocate_state  # of a compute parameter
        self._place_state = place_state
        self._meter = meter
        self._swapper = swapper
        self._orthogonalise = orthogonalise
        # the user's object, the one in use, and what gives their methods back
        self._adopted: list[tuple[Optimizer, Optimizer, ExitStack]] = []

    def adopt(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that takes the place of `optimizer` (itself unless it is torch's Adam or AdamW).

        On failure `release` undoes what has been done so far.
        """
        undo = ExitStack()
        self._adopted.append((optimizer, optimizer, undo))
        self._take_in(optimizer, optimizer.param_groups)
        current = optimizer

        def with_masters(param_group: dict[str, Any]) -> dict[str, Any]:
            entries = param_group["params"]
            given: list[Any] = [entries] if isinstance(entries, torch.Tensor) else list(entries)
            names = [each[0] if isinstance(each, tuple) else None for each in given]
            pairs = self._adopted_pairs(current, [each[1] if isinstance(each, tuple) else each for each in given])
            masters: list[Any] = [
                pair.master if name is None else (name, pair.master) for name, pair in zip(names, pairs, strict=True)
            ]
            return {**param_group, "params": masters}

        if self._precisions.becomes_cpu_adam(optimizer):
            current = adam = self._make_cpu_adam(optimizer)
            adam.enter_run(self._meter.sums_of, self._updates.wait, with_masters)
        else:
            self.place_state(optimizer)  # some, such as Adagrad, make theirs when they are constructed
            add = type(current).add_param_group
            _replace(undo, current, "add_param_group", lambda group: add(current, with_masters(group)))
        self._await(current)
        self._adopted[-1] = (optimizer, current, undo)

        step = HostStep(current, self._grads, self._guard, self._updates, self.place_state, self._orthogonalise)
        _replace(undo, current, "step", step)
        for name in ("train", "eval"):  # of an optimizer without a schedule, they swap all values: the model gets them
            if callable(getattr(current, name, None)):
                _replace(undo, current, name, self._showing_new_values(current, getattr(current, name)))
        if current is not optimizer:  # a reference the user kept steps the same one
            own_step = vars(optimizer).get("step")  # a scheduler's wrapper
            optimizer.step = step  # type: ignore[method-assign]
            undo.callback(_set_or_delete, optimizer, "step", own_step)
        return current

    def _showing_new_values(self, optimizer: Optimizer, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            parameters = [p for group in optimizer.param_groups for p in plain(group["params"])]
            versions = [p._version for p in parameters]
            self._updates.prepare()
            result = method(*args, **kwargs)
            written = [p for p, version in zip(parameters, versions, strict=True) if p._version != version]
            if written:
                self._updates.write_back(optimizer, written)
                self._updates.note_masters()
            return result

        return call

    def place_state(self, optimizer: Optimizer) -> None:
        """Move optimizer state in ordinary memory (loaded, or made too early) to where the policy wants it."""
        self._place_state(optimizer, self._masters.compute_of)

    def adopt_joined(self) -> None:
        """Adopt parameters of the model that have come into groups by another way than `add_param_group`."""
        for _, optimizer, _ in self._adopted:
            joined = []
            for group in optimizer.param_groups:
                parameters = plain(group["params"])
                pairs = map(self._masters.find, parameters)
                if not all(pair is not None and pair.master is p for pair, p in zip(pairs, parameters, strict=True)):
                    joined.append(group)
            if joined:
                self._take_in(optimizer, joined)
            self._await(optimizer)

    @contextmanager
    def showing_model(self) -> Iterator[None]:
        """Return a region where groups have the model's own parameters; those that join are adopted."""
        self._settle()
        with ExitStack() as undo:
            undo.callback(self.adopt_joined)
            for _, optimizer, _ in self._adopted:
                add = partial(self._add_and_show, optimizer, optimizer.add_param_group)
                _replace(undo, optimizer, "add_param_group", add)
                self._show_model(optimizer)
            yield

    def _add_and_show(self, optimizer: Optimizer, add: Callable[[Any], None], param_group: Any) -> None:
        self.adopt_joined()  # for torch, which looks whether a parameter is in a group already
        try:
            add(param_group)
        finally:
            self._show_model(optimizer)

    def _show_model(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["params"][:] = [self._masters.compute_of(parameter) for parameter in plain(group["params"])]

    def _await(self, optimizer: Optimizer) -> None:
        """Let whoever reads the parameters of a group find new weights and complete gradients."""
        if isinstance(optimizer, LBFGS) or not evaluates_first(optimizer):
            return  # it has, or may have, a reference of its own to the list
        for group in optimizer.param_groups:
            if not isinstance(group["params"], AwaitedParams):
                group["params"] = AwaitedParams(group["params"], self._settle, self._grads.complete_for_access)

    def _settle(self) -> None:
        self._updates.wait()
        self._grads.complete_for_access()

    def _take_in(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Put masters in the place of the model's parameters."""
        pairs = self._adopted_pairs(optimizer, [p for group in groups for p in group["params"]])
        masters = (pair.master for pair in pairs)
        for group in groups:
            group["params"][:] = [next(masters) for _ in group["params"]]  # in place: LBFGS has a reference of its own
        for pair in pairs:
            _rekey(optimizer, pair.compute, pair.master)

    def _adopted_pairs(self, optimizer: Optimizer, parameters: Iterable[Parameter]) -> list[WeightPair]:
        """Return parameters with their masters, whose gradients are received from now on."""
        pairs = [self._masters.adopt(p, self._precisions.form_for(optimizer, p)) for p in parameters]
        # bitsandbytes keeps settings of single parameters by identity; the Trainer makes some: embeddings in 32 bits
        manager = getattr(optimizer, "mng", None)
        settings = getattr(manager, "pid2config", None)
        if manager is not None and settings is not None:
            of_modules = {id(getattr(module, name)): it for module, name, it in manager.module_weight_config_triple}
            for pair in pairs:
                found = of_modules.get(id(pair.compute), settings.get(id(pair.compute)))
                if found is not None:
                    settings[id(pair.master)] = found
        self._grads.watch(pairs)
        return pairs

    def release(self) -> None:
        """Give the user's optimizers back as they were, on the model's own parameters, with the state they have now."""
        adopted, self._adopted = self._adopted, []
        with ExitStack() as rest:
            for each in adopted:
                rest.callback(self._release, *each)

    def _release(self, original: Optimizer, current: Optimizer, undo: ExitStack) -> None:
        try:
            if isinstance(current, CPUAdam):
                current.exit_run()  # first: access to state of a run waits for writes, which may fail again
        finally:
            undo.close()
            for group in current.param_groups:
                own = []
                for parameter in group["params"]:
                    pair = self._masters.find(parameter)
                    if pair is not None:
                        _rekey(current, pair.master, pair.compute)
                    own.append(parameter if pair is None else pair.compute)
                if isinstance(group["params"], AwaitedParams):
                    group["params"] = own
                else:
                    group["params"][:] = own
            if original is not current:
                original.state, original.param_groups = _state_of(current), current.param_groups

    def _make_cpu_adam(self, optimizer: Optimizer) -> CPUAdam:
        options: dict[str, Any] = {
            "num_threads": self._meter.num_threads,
            "swapper": self._swapper,
            "compute_weights": self._masters.kernel_weights,
            "state": self._precisions.state,
            "fp32_state": _Sensitive(self._masters, partial(self._precisions.is_sensitive, optimizer)),
        }
        if isinstance(optimizer, CPUAdam):  # the user's own: what it was constructed with holds
            options |= {
                "num_threads": optimizer.num_threads,
                "isa": optimizer.isa,
                "state": optimizer.state_precision,
                "seed": optimizer.seed,
                "compute_weights": ChainMap[Any, Any](
                    self._masters.kernel_weights, cast(Any, optimizer.compute_weights)
                ),
            }
        classes: dict[type[Optimizer], type[CPUAdam]] = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam}
        kind = next((ours for theirs, ours in classes.items() if isinstance(optimizer, theirs)), CPUAdam)

        def allocate_state(master: torch.Tensor, role: TensorRole, dtype: torch.dtype, numel: int) -> torch.Tensor:
            return self._allocate(self._masters.compute_of(master), role, dtype, numel)

        return kind.from_torch(optimizer, allocate_state=allocate_state, **options)


class _Sensitive:
    def __init__(self, masters: MasterWeights, is_sensitive: Callable[[torch.Tensor], bool]) -> None:
        self._masters = masters
        self._is_sensitive = is_sensitive

    def __contains__(self, master: object) -> bool:
        return isinstance(master, torch.Tensor) and self._is_sensitive(self._masters.compute_of(master))

    def __reduce__(self) -> tuple[type[dict[torch.Tensor, None]], tuple[dict[torch.Tensor, None]]]:
        # a copied optimizer has most of its state already, and makes that of parameters that were frozen so far
        return dict, ({pair.master: None for pair in self._masters if self._is_sensitive(pair.compute)},)


def _replace(undo: ExitStack, target: object, name: str, method: Callable[..., Any]) -> None:
    """Put a method on an object, until `undo`, unless someone has put another one there meanwhile."""
    before = vars(target).get(name)
    setattr(target, name, method)

    def restore() -> None:
        if vars(target).get(name) is method:
            _set_or_delete(target, name, before)

    undo.callback(restore)


def _set_or_delete(target: object, name: str, value: Any) -> None:
    if value is None:
        vars(target).pop(name, None)
    else:
        setattr(target, name, value)


def _rekey(optimizer: Optimizer, old: Parameter, new: Parameter) -> None:
    """State of an optimizer is keyed by parameter: move it along."""
    state = _state_of(optimizer)
    if old is not new and old in state:
        state[new] = state.pop(old)


def _state_of(optimizer: Optimizer) -> defaultdict[torch.Tensor, Any]:
    """Return the state of an optimizer, which no update changes now; empty where it was lost with a drive."""
    if not isinstance(optimizer, CPUAdam):
        return optimizer.state
    optimizer.wait()
    return optimizer.plain_state


def describe_optimizer(optimizer: Optimizer) -> str:
    parameters = [parameter for group in optimizer.param_groups for parameter in plain(group["params"])]
    own, there = type(optimizer).__name__, sum(isinstance(optimizer, CPUAdam) and not p.is_cpu for p in parameters)
    rest = f"on the host, {len(optimizer.param_groups)} groups, {len(parameters)} parameters"
    rest += f" ({there} of them on the device)" if there else ""
    if not isinstance(optimizer, CPUAdam):
        return f"{own} {rest}"
    name = own if type(optimizer) is CPUAdam else f"{own} by CPUAdam"
    return f"{name} {rest}, {optimizer.state_precision} state, {optimizer.isa}, {optimizer.num_threads} threads"


def repoint_scheduler(scheduler: object, old: Optimizer, new: Optimizer) -> None:
    """Make a scheduler, and the schedulers it contains, drive `new` instead of `old`."""
    for name, value in list(vars(scheduler).items()):
        if value is old:
            setattr(scheduler, name, new)
        elif isinstance(value, (LRScheduler, ReduceLROnPlateau)):
            repoint_scheduler(value, old, new)
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, (LRScheduler, ReduceLROnPlateau)):
                    repoint_scheduler(item, old, new)
