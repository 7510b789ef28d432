"""`GradientOffload`: the life of every gradient, from autograd to the optimizer.

[Note: Life of a gradient]
Autograd adds what it has computed for a parameter to ``p.grad`` and calls our hook: once per backward, or once per use
of a parameter that has changed its device between uses ([Note: Which hooks stay]). What follows depends on where the
parameter and its master are (see [Note: Compute and master weights]):

* Shared, always on the host: the first gradient moves into memory of ours, which becomes ``p.grad``. Autograd itself
  adds later ones to it in float32. In 16 bits such sums would be rounded to nearest every time and lose small
  gradients: a hook before the accumulation takes the sum so far away (the *stash*), autograd delivers the new gradient
  alone, and we add it in float32. Of shards, whose gradients FSDP2 delivers, sums are stashed when a backward begins.
* Separate master, the host computes: it is moved, or added, at once, and becomes ``master.grad``.
* Master on the device (``state_on_device``): as in these two, but nothing moves; sums of 16 bits become float32.
* From a device (streamed weights, or the master of what is on the device):
  1. It joins the group of its unit. A group is copied to the host when it is complete, when the gradient of another
     group comes, or when its unit or the backward is over; what comes later makes a group of its own. A parameter
     without a unit is a group. A group takes one piece of host memory per placement, copies with one event behind
     them, and one accumulation that waits for them: on the worker, if there is one, else by whoever needs the result.
     Groups are accumulated in the order in which they were copied, so that no sum depends on time.
  2. The first gradient of a step lands where it stays. Others, and those of another type than the one that is kept,
     land in staging memory, of at most `MAX_STAGED` groups: one more waits for the oldest. A second 16-bit gradient
     makes the sum float32, or stays bfloat16, rounded stochastically (``accumulate="bf16"``). `CPUAdam` reads 16-bit
     gradients as they are, other optimizers get float32.
  3. If updates run behind the backward, `Updates` takes the gradients of a unit that is over (`hand_over`): they
     never become ``.grad``. More gradients for such a parameter, in the same step, are refused: they would be lost.
  4. All others become ``master.grad`` when they are *completed*: at the end of a backward, if it is the last of a step
     or somebody may read gradients between micro-batches (`are_read_early`); else at the step, or when somebody gets
     at gradients through a module, an optimizer's groups, or ``.grad`` where the master is separate
     (`complete_for_access`). Meanwhile the sum so far is in `_sums`, and ``.grad`` is None.
* Whether a step is accumulating, ``.grad`` of the master alone says: None means that the next gradient is the first. So
  ``zero_grad``, ``p.grad = None`` and user code that edits gradients keep their meaning.
* On the device a gradient is held from its arrival until its copy is done: autograd would add to it in place else. The
  host may be far ahead, so "done" is what the device knows, not the host: its computing stream waits for the oldest
  group while more than the bytes of the largest one are being copied ([Note: Copies and streams]).
* A backward that fails does not come to its end: what has left the device is dropped when the next one starts. The
  rest is as torch has it: what autograd has added to ``.grad`` stays until it is zeroed.
* Gradient memory belongs to ``.grad`` alone: whoever holds an old gradient keeps its values, and ``zero_grad`` gives
  the bytes back. Our memory is known by the tensor itself: memory that was given back may be anybody's.
* Gradients are numbered as autograd delivers them, whenever copies are done. The random bits of a sum depend on that.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_cxl.devices import Transfer, TransferEngine
from lightning_cxl.errors import UnsupportedError
from lightning_cxl.gradients.guard import Addition, GradientHooks, GradientMeter, OverflowGuard, ReplacedMethod
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.optim.kernels import mix_key
from lightning_cxl.optim.masters import WeightPair, is_on_host
from lightning_cxl.shards import is_replicated, is_sharded, local, sharded_like
from lightning_cxl.timing import named
from lightning_cxl.torch_private import at_end_of_backward, backward_id, plain_grad, set_plain_grad

AllocateAll = Callable[[Sequence[tuple[Parameter, torch.dtype]], TensorRole], list[torch.Tensor]]
"""Returns uninitialised host tensors like compute parameters, those of one placement in one piece of memory."""

MAX_STAGED = 3
"""Groups in staging memory at most: one lands, one is accumulated, one is slack."""
_HALF = (torch.bfloat16, torch.float16)


@dataclass(slots=True, eq=False)
class Gradient:
    """A gradient from autograd: on its device, and then on the host."""

    pair: WeightPair
    grad: torch.Tensor
    key: int
    """Of stochastic rounding."""
    stays: bool
    """It is the first of a step and of the type that is kept, so it lands in memory where it stays."""


@dataclass(slots=True, eq=False)
class GradientGroup:
    """Gradients that are copied to the host together."""

    pair_ids: frozenset[int]
    is_staged: bool
    """Some are in staging memory until they are accumulated."""
    transfer: Transfer
    gradients: list[Gradient]
    """Empty once they are accumulated, so that staging memory goes back."""
    accumulate: Callable[["GradientGroup"], None]
    result: "Future[None] | None" = None
    """Of the worker; None where `wait` accumulates."""

    def done(self) -> bool:
        """Whether `wait` would not wait."""
        return self.transfer.done() if self.result is None else self.result.done()

    def wait(self) -> None:
        """Return when the gradients are in the sums; raises what went wrong."""
        if self.result is not None:
            self.result.result()
        elif self.gradients:
            self.accumulate(self)


@dataclass(slots=True, eq=False)
class _WaitingUpdate:
    order: int
    num_groups: int
    """Groups that were copied before: they are accumulated first."""
    job: Callable[[], None]


class HostWorker:
    """One thread that accumulates groups and runs updates.

    A group comes first once it has landed, in the order in which groups were copied. Else the update comes whose
    weights the device needs first: behind a backward that is faster than updates are, those of the last units wait, and
    the forward that follows meets only new weights or short waits.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor  # of one thread
        self._lock = threading.Lock()
        self._groups: deque[GradientGroup] = deque()
        self._updates: list[_WaitingUpdate] = []
        self._num_groups = self._num_accumulated = 0

    def accumulate(self, group: GradientGroup) -> None:
        group.result = Future()
        with self._lock:
            self._groups.append(group)
            self._num_groups += 1
        self._executor.submit(self._run_one)

    def update(self, order: int, job: Callable[[], None], result: "Future[None]") -> None:
        """Run a job that needs all gradients that were copied before it; of several, the one of the lowest order."""
        with self._lock:
            self._updates.append(_WaitingUpdate(order, self._num_groups, partial(_run, job, result)))
        self._executor.submit(self._run_one)

    def _run_one(self) -> None:
        with self._lock:
            ready = [each for each in self._updates if each.num_groups <= self._num_accumulated]
            takes_group = bool(self._groups) and (not ready or self._groups[0].transfer.done())
            group = self._groups.popleft() if takes_group else None
            update = None if takes_group else min(ready, key=lambda each: each.order)
            if update is not None:
                self._updates.remove(update)
        if update is not None:
            update.job()
        elif group is not None and group.result is not None:
            _run(partial(group.accumulate, group), group.result)
            self._num_accumulated += 1


def _run(job: Callable[[], None], result: "Future[None]") -> None:
    try:
        job()
    except BaseException as error:
        result.set_exception(error)
    else:
        result.set_result(None)


class GradientOffload:
    """Receives the gradients of adopted parameters. See [Note: Life of a gradient]."""

    def __init__(
        self,
        engine: TransferEngine,
        allocate_all: AllocateAll,
        meter: GradientMeter,
        worker: HostWorker | None,
        release_units: Callable[[], None],
        streamed: Mapping[int, object],  # the unit of each parameter on the host, by the parameter's id
        *,
        half_sums: bool = False,  # bfloat16 gradients are added up in bfloat16
        reserves_streamed: bool = True,  # `watch` makes sure that the gradients of all streamed parameters have room
        guard: OverflowGuard | None = None,  # that looks at gradients as they land; else only when somebody asks
        are_read_early: bool = True,  # someone may read gradients between the micro-batches of a step
    ) -> None:
        self.engine = engine
        self._allocate_all = allocate_all
        self._meter = meter
        self._worker = worker
        self._release_units = release_units
        self._streamed = streamed
        self._half_sums = half_sums
        self._reserves_streamed = reserves_streamed
        self._guard = guard
        self._are_read_early = are_read_early
        self.updates: Any = None  # `Updates`, where they run behind the backward
        self.num_received = 0  # gradients so far: makes every stochastic rounding another one
        self._watched: dict[int, tuple[WeightPair, GradientHooks]] = {}  # by id of the compute parameter
        self._units: dict[int, list[WeightPair]] = {}  # what is watched of each unit, by the unit's id
        self._own: dict[int, weakref.ref[torch.Tensor]] = {}  # the latest memory of ours, by id of the pair
        self._stash: dict[int, tuple[WeightPair, torch.Tensor]] = {}  # sums of shared parameters, by id of the pair
        self._backward: int | None = None  # that `finish` will be called for
        self._may_run = False  # a backward, in any thread: also one that failed before any hook of ours was called
        self._is_last_backward = False  # of a step: its optimizer has asked for it
        # gradients from the device
        self._unit: object = None  # whose group is not complete
        self._group: dict[int, Gradient] = {}  # what has come of it, by id of the pair
        self._group_size = 1  # gradients that it gets
        self._groups: deque[GradientGroup] = deque()  # copied, not known to be accumulated
        self._staged: deque[GradientGroup] = deque()  # of these and of those handed over, where there is a worker
        self._on_device: deque[tuple[Transfer, int]] = deque()  # that the device has not waited for, and their bytes
        self._device_bytes = self._largest_bytes = 0
        self._pending: dict[int, WeightPair] = {}  # whose ``.grad`` is None because gradients are on their way, by id
        self._sums: dict[int, torch.Tensor] = {}  # of these and of those handed over, so far, by id of the pair
        self._handed: dict[int, list[GradientGroup]] = {}  # groups of gradients that an update takes, by id of the pair
        self._given: set[int] = set()  # ids of pairs handed over in this step

    # -- what is received

    def watch(self, pairs: list[WeightPair]) -> None:
        """Receive the gradients of these parameters from now on (each is watched once)."""
        new = [pair for pair in pairs if id(pair.compute) not in self._watched]
        groups: dict[int, list[WeightPair]] = {}  # as their gradients are copied
        for pair in new:
            unit = self._unit_of(pair)
            if pair.compute.requires_grad and (unit is None or self._reserves_streamed) and not pair.is_on_device:
                groups.setdefault(id(pair if unit is None else unit), []).append(pair)
        reserved = [self._new_memory(group, [pair.grad_dtype for pair in group]) for group in groups.values()]
        for pair in new:
            half = pair.master.dtype in _HALF or pair.grad_dtype in _HALF
            if half:
                cast(Any, pair.master).grad_dtype = None
            stays = pair.is_shared or pair.is_on_device or self.engine.computes_on_host
            if self._unit_of(pair) is not None or not stays:
                receive, before = partial(self._receive_from_device, pair), partial(self._begin_pending, pair)
                hooks = GradientHooks(pair.compute, receive, before, stays=False)
            elif pair.is_shared:  # hooks of the user find in `.grad` what autograd alone would have put there
                stashing = partial(self._stash_sum, pair) if half and not is_sharded(pair.compute) else None
                hooks = GradientHooks(pair.compute, partial(self._receive_shared, pair), stashing, stays=True)
            else:
                hooks = GradientHooks(pair.compute, partial(self._receive_separate, pair), stays=False)
            pair.put_front(self.complete_for_access)
            self._watched[id(pair.compute)] = (pair, hooks)
            self._units.setdefault(id(self._unit_of(pair)), []).append(pair)
        del reserved  # back to the pool, which keeps the pages for the first backward

    def _unit_of(self, pair: WeightPair) -> object:
        return self._streamed.get(id(pair.compute))

    def _stash_sum(self, pair: WeightPair) -> None:
        """Take the sum so far away, if it is one that more can be added to."""
        self._stash.pop(id(pair), None)  # of a backward that failed: the user may have zeroed gradients since
        grad = pair.master.grad
        if grad is not None and grad.layout is torch.strided and not grad.requires_grad:
            self._stash[id(pair)], pair.master.grad = (pair, grad), None

    def _receive_shared(self, pair: WeightPair) -> None:
        grad, key = pair.compute.grad, self._next_key()
        _, before = self._stash.pop(id(pair), (None, None))
        if grad is None or grad.layout is not torch.strided or grad.requires_grad:
            # nothing, sparse (the user's own optimizer understands it), or part of a graph (create_graph=True)
            if before is not None:
                with torch.enable_grad():
                    pair.compute.grad = before if grad is None else before + grad
            return
        if before is not None:
            pair.compute.grad = self._add([Gradient(pair, grad, key, stays=False)], [before])[0]
        elif not pair.is_on_device and not self.is_ours(pair, grad):  # else autograd added it in place
            pair.compute.grad = self._move([pair], [grad], [grad.dtype])[0]
        elif is_sharded(grad):  # or FSDP2 did, which leaves no trace
            if grad.dtype in _HALF:
                raise UnsupportedError(
                    f"gradients of `{pair.name}` were added up in {grad.dtype}: with several processes, call "
                    "`accelerator.backward(loss)`, `fabric.backward(loss)` or `self.manual_backward(loss)` once for "
                    "each backward, instead of `loss.backward()`"
                )
            torch.autograd.graph.increment_version([grad])

    def _receive_separate(self, pair: WeightPair) -> None:
        grad = _taken_from(pair)
        if grad is None or not pair.master.requires_grad:
            return
        before, key = pair.master.grad, self._next_key()
        self._refuse_part(pair, is_first=before is None)
        if before is None:
            pair.master.grad = grad if pair.is_on_device else self._move([pair], [grad], [pair.grad_dtype])[0]
        else:
            pair.master.grad = self._add([Gradient(pair, grad, key, stays=False)], [before])[0]

    def _receive_from_device(self, pair: WeightPair) -> None:
        grad = _taken_from(pair)
        if grad is None or not (pair.is_shared or pair.master.requires_grad):
            return
        grad = local(grad)
        self.finish_at_the_end()  # before anything that may fail: `release_units` waits for this backward then
        self._check(pair, grad)
        self._begin_pending(pair)
        unit = self._unit_of(pair)
        if unit is not self._unit or id(pair) in self._group:
            self._copy_group()
        is_first = id(pair) not in self._pending
        self._refuse_part(pair, is_first=is_first)
        self._pending[id(pair)] = pair
        self._unit = unit
        stays = is_first and grad.dtype is pair.grad_dtype
        if not self._group:
            self._group_size = 1 if unit is None else sum(each.compute.requires_grad for each in self._units[id(unit)])
        self._group[id(pair)] = Gradient(pair, grad, self._next_key(), stays)
        if len(self._group) >= self._group_size:
            self._copy_group()
            if unit is not None and is_sharded(pair.compute):  # FSDP2 has reduced all of the unit
                self.unit_is_over(unit)
        if unit is None and self.updates is not None:
            self.updates.resident_has_come(pair)

    def _begin_pending(self, pair: WeightPair) -> None:
        """Take the sum so far out of ``.grad``, once, as it is on the host and autograd's gradient is not."""
        grad = pair.master.grad
        if id(pair) in self._pending or grad is None or grad.layout is not torch.strided or grad.requires_grad:
            return
        self._sums[id(pair)], pair.master.grad = grad, None
        self._pending[id(pair)] = pair
        self.finish_at_the_end()  # also if nothing arrives, because `torch.autograd.grad` takes it

    def _refuse_part(self, pair: WeightPair, *, is_first: bool) -> None:
        if is_first or self._watched[id(pair.compute)][1].are_alone:
            return
        self._settle()
        before = self._sums.get(id(pair), pair.master.grad)
        if before is None or local(before).any():  # not what `zero_grad(set_to_none=False)` has left
            raise UnsupportedError(
                f"a hook of `register_post_accumulate_grad_hook` found one of several gradients of `{pair.name}` in "
                "`.grad`, and not their sum, which is elsewhere. Use `register_hook`, which gets each of them, or read "
                "and edit `.grad` after the last backward of the step"
            )

    def _check(self, pair: WeightPair, grad: torch.Tensor) -> None:
        if grad.device != (device := self.engine.device):
            where = f"`{pair.name}` got a gradient on `{grad.device}`, and the model computes on `{device}`"
            if id(pair.compute) in self._streamed:
                raise UnsupportedError(
                    f"{where}: it was used outside of its unit's forward, where it is on the host. Move that use, such "
                    "as a penalty on weights, into the unit's forward, use weight decay, or set `stream_weights=False`"
                )
            raise UnsupportedError(
                f"{where}: the parameter is on `{pair.compute.device}`, so it does not belong to the model, or was "
                "moved. Register it in the module, and leave it where it is"
            )
        if id(pair) in self._given:
            raise UnsupportedError(
                f"`{pair.name}` got a gradient after its update had begun: it is used outside of its unit, or the step "
                "runs several backwards. Set `overlap_step=False`, so that updates wait for the end of the backward"
            )

    def _next_key(self) -> int:
        self.num_received += 1
        return mix_key(self.num_received)

    # -- sums, in host memory

    def is_ours(self, pair: WeightPair, grad: torch.Tensor) -> bool:
        """Return whether `grad` is the very tensor that was given out last for the gradient of `pair`."""
        own = self._own.get(id(pair))
        return own is not None and own() is grad

    def _new_memory(self, pairs: Sequence[WeightPair], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Return memory where gradients stay."""
        memory: dict[int, torch.Tensor] = {
            id(pair): torch.empty_like(pair.compute, dtype=dtype, requires_grad=False)
            for pair, dtype in zip(pairs, dtypes, strict=True)
            if pair.is_on_device
        }
        for role in (TensorRole.COMPUTE_GRADS, TensorRole.MASTER_GRADS):
            wanted = [
                (pair, dtype)
                for pair, dtype in zip(pairs, dtypes, strict=True)
                if pair.is_same_memory is (role is TensorRole.COMPUTE_GRADS) and not pair.is_on_device
            ]
            if wanted:
                given = self._allocate_all([(pair.compute, dtype) for pair, dtype in wanted], role)
                for (pair, _), own in zip(wanted, given, strict=True):
                    memory[id(pair)] = sharded_like(own, pair.compute)
        self._own.update({key: weakref.ref(tensor) for key, tensor in memory.items()})
        return [memory[id(pair)] for pair in pairs]

    def _move(
        self, pairs: Sequence[WeightPair], grads: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor]:
        memory = self._new_memory(pairs, dtypes)
        self._meter.copy_all(list(zip(grads, memory, strict=True)))
        return memory

    def _add(self, landed: Sequence[Gradient], before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums of `before` and gradients, in the memory of `before` or in wider memory."""
        sums = list(before)
        widened = [
            index
            for index, grad in enumerate(sums)
            if grad.dtype in _HALF and not (self._half_sums and grad.dtype is torch.bfloat16 and grad.is_cpu)
        ]
        if widened:
            pairs, grads = [landed[index].pair for index in widened], [before[index] for index in widened]
            for index, total in zip(widened, self._move(pairs, grads, [torch.float32] * len(widened)), strict=True):
                sums[index] = total
        self._meter.accumulate_all(
            [Addition(each.grad, total, each.key) for each, total in zip(landed, sums, strict=True)]
        )
        return sums

    # -- from the device to the host

    def _copy_group(self) -> None:
        group, self._group = list(self._group.values()), {}
        if not group:
            return
        staying = [each for each in group if each.stays]
        staged = [each for each in group if not each.stays]
        if self._worker is None:
            while staged and sum(each.is_staged for each in self._groups) >= MAX_STAGED:
                self._groups.popleft().wait()
        while self._staged and (self._staged[0].done() or (staged and len(self._staged) >= MAX_STAGED)):
            self._staged.popleft().wait()
        memory = self._new_memory([each.pair for each in staying], [each.grad.dtype for each in staying])
        if staged:
            memory += self._allocate_all([(each.pair.compute, each.grad.dtype) for each in staged], TensorRole.STAGING)
        copied = staying + staged
        copies = [(each.grad, local(there)) for each, there in zip(copied, memory, strict=True)]
        # FSDP2 allocates on the stream that scatters, and calls hooks on the one that reduces over machines
        from_here = not any(is_replicated(each.pair.compute) for each in copied)
        with named("gradients to the host"):
            transfer = self.engine.d2h_all(copies, from_here=from_here)
        nbytes = sum(source.nbytes for source, _ in copies)
        self._on_device.append((transfer, nbytes))
        self._device_bytes += nbytes
        self._largest_bytes = max(self._largest_bytes, nbytes)
        while self._device_bytes > self._largest_bytes:
            oldest, nbytes = self._on_device.popleft()
            oldest.wait()
            self._device_bytes -= nbytes
        landed = [Gradient(each.pair, there, each.key, each.stays) for each, there in zip(copied, memory, strict=True)]
        pair_ids = frozenset(id(each.pair) for each in copied)
        started = GradientGroup(pair_ids, bool(staged), transfer, landed, self._accumulate)
        if self._worker is not None:
            self._worker.accumulate(started)
            if staged:
                self._staged.append(started)
        self._groups.append(started)
        while self._groups and self._groups[0].done():
            self._groups.popleft().wait()

    @torch.no_grad()
    def _accumulate(self, group: GradientGroup) -> None:
        """Add gradients of different parameters to the sums so far, when they have landed."""
        group.transfer.wait_host()
        landed, group.gradients = group.gradients, []
        later = [each for each in landed if id(each.pair) in self._sums]
        news = [each for each in landed if id(each.pair) not in self._sums]
        staying = [each for each in news if each.stays]
        self._sums.update({id(each.pair): each.grad for each in staying})
        moving = [each for each in news if not each.stays]
        if moving:
            pairs = [each.pair for each in moving]
            moved = self._move(pairs, [each.grad for each in moving], [pair.grad_dtype for pair in pairs])
            self._sums.update({id(pair): grad for pair, grad in zip(pairs, moved, strict=True)})
        if later:
            sums = self._add(later, [self._sums[id(each.pair)] for each in later])
            self._sums.update({id(each.pair): total for each, total in zip(later, sums, strict=True)})
        if self._guard is not None:
            self._guard.look({each.pair.master: self._sums[id(each.pair)] for each in landed})

    def _settle(self) -> None:
        """Return when all groups are accumulated; raises what went wrong first."""
        self._copy_group()
        if self._groups:
            with self.engine.stall("stall_gradients_s", "wait for gradients"):
                while self._groups:
                    self._groups.popleft().wait()

    def complete(self) -> None:
        """Return when every gradient that has come is where the optimizer reads it."""
        self._settle()
        for pair in self._pending.values():
            pair.master.grad = self._sums.pop(id(pair))
        self._pending.clear()

    def hand_over(self, candidates: Iterable[WeightPair]) -> list[WeightPair]:
        """Return those of the candidates whose gradients have come from the device, as they came.

        The caller then gets each of these gradients with `take`; `complete` leaves them out.
        """
        wanted = {id(pair) for pair in candidates}
        pairs = [pair for key, pair in self._pending.items() if key in wanted]
        own = {id(pair) for pair in pairs}
        self._copy_group()
        claimed = [group for group in self._groups if not group.pair_ids.isdisjoint(own)]
        self._groups = deque(group for group in self._groups if not group.pair_ids.issubset(own))
        for key in own:
            del self._pending[key]
            self._handed[key] = [group for group in claimed if key in group.pair_ids]
        self._given |= own
        return pairs

    def take(self, pair: WeightPair) -> torch.Tensor:
        """Return a gradient that was handed over, on the worker: after it has been accumulated; raises its error."""
        for group in self._handed.pop(id(pair)):
            group.wait()
        return self._sums.pop(id(pair))

    # -- what a backward tells, in this order

    def start_backward(self) -> None:
        """Forget what a backward that failed left behind; another one begins."""
        self.release_units()
        self._stash.clear()
        for pair, _ in self._watched.values():
            if pair.is_shared and is_sharded(pair.compute):
                self._stash_sum(pair)
        self._forget_failed()
        self._may_run = True
        if self.updates is not None:
            self.updates.begin_backward()

    def _forget_failed(self) -> None:
        if self._backward is not None:
            self._group = {}
            self._settle()
            for key in self._pending:
                self._sums.pop(key, None)
            self._pending.clear()
        self._backward = None

    def start_forward(self) -> None:
        """Forget a backward that failed, also where no front end tells that another one begins (`loss.backward()`)."""
        if self._backward is not None and backward_id() is None:
            self.release_units()
            self._forget_failed()

    def finish_at_the_end(self) -> None:
        """Let `loss.backward()` return with complete gradients, whoever called it; not where it fails."""
        # also called before a recompute: a backward inside of the unit, such as a reentrant checkpoint's, ends while
        # weights are still read, so the one that ends last is the one that `finish` waits for
        backward = backward_id()
        if self._backward is None and backward is not None:
            self._backward, self._may_run = backward, True
            at_end_of_backward(self.finish)

    def unit_is_over(self, unit: object) -> None:
        """Learn that the backward of a streamed unit is over: its gradients have come."""
        if self.updates is not None:
            self.updates.unit_is_over(unit)

    def finish(self) -> None:
        """Note that a backward is over: its gradients are complete now, or on their way if nobody reads them yet."""
        self._release_units()
        while self._stash:  # no other gradient has come
            _, (pair, grad) = self._stash.popitem()
            pair.master.grad = grad
        self._copy_group()
        if self._are_read_early or self._is_last_backward:
            self.complete()
        self._backward, self._may_run = None, False  # not where that fails: the next backward forgets what is left

    # -- what a step tells

    def begin_step(self) -> None:
        # the next backward is the last of a step: gradients are read when it is over
        self._is_last_backward = True
        self._given.clear()  # of the step before, whose closure may have failed

    def end_step(self) -> None:
        """Learn that no backward of the step comes any more; return when gradients are where the optimizer reads."""
        for pair, _ in self._watched.values():
            if not pair.is_shared and is_sharded(pair.compute) and plain_grad(pair.compute) is not None:
                raise UnsupportedError(
                    f"`{pair.name}` was assigned a gradient (`p.grad = ...`) on the model. With several processes its "
                    "master weights are separate: assign it to the parameter in `optimizer.param_groups`"
                )
        self._is_last_backward = False
        self._given.clear()
        self._release_units()
        self.complete()

    # -- what others ask

    def release_units(self) -> None:
        """Give the device memory of all units back; between backwards, of which the last may have failed."""
        if self._may_run:
            wait_for_failed_backward(self.engine.device)  # else a gradient may come after its weight has gone
            self._may_run = False  # nobody waits twice
        self._release_units()

    def complete_for_access(self) -> None:
        """Complete the gradients for someone who accesses parameters and may read, edit or zero them.

        Not in the middle of a backward, and not while a unit computes: its weights are on the device, and torch takes a
        gradient beside its parameter only.
        """
        if self._backward is None and all(is_on_host(pair.master) for pair in self._pending.values()):
            self.complete()

    def zero(self, parameters: Iterable[torch.Tensor]) -> None:
        """Complete gradients, which may then be dropped, and forget those of shards, where ``.grad`` is not shown."""
        self._release_units()
        self.complete()
        for parameter in parameters:
            pair, _ = self._watched.get(id(parameter), (None, None))
            if pair is not None and not pair.is_shared and is_sharded(pair.compute):
                pair.master.grad = None

    def close(self) -> None:
        """Stop receiving and drop the gradients that live in our memory; nothing that still runs is waited for."""
        for pair, hooks in self._watched.values():
            hooks.remove()
            pair.remove_front()
            grad = pair.master.grad
            is_part = id(pair) in self._stash or id(pair) in self._pending  # the rest of a backward that failed
            if grad is not None and (is_part or pair.is_on_device or self.is_ours(pair, grad)):
                pair.master.grad = grad = None
            if pair.master.grad_dtype is None and (grad is None or grad.dtype is pair.master.dtype):
                pair.master.grad_dtype = pair.master.dtype
        self._groups.clear()
        self._staged.clear()
        self._on_device.clear()
        for state in (self._group, self._pending, self._handed, self._sums, self._stash, self._watched, self._units):
            state.clear()


def _taken_from(pair: WeightPair) -> torch.Tensor | None:
    """Return the gradient that a parameter has, dense; it has none then."""
    grad = plain_grad(pair.compute)
    set_plain_grad(pair.compute, None)
    if grad is not None and grad.requires_grad:
        raise UnsupportedError(
            f"`{pair.name}` got a gradient that is part of a graph (`backward(create_graph=True)`), and is kept where "
            "no graph is: what is computed from it would have no gradient. Ask for gradients that are to be "
            "differentiated with `torch.autograd.grad(..., create_graph=True)`, and where these are gradients of "
            "weights, set `stream_weights=False`"
        )
    return None if grad is None else (grad if grad.layout is torch.strided else grad.to_dense()).detach()


def wait_for_failed_backward(device: torch.device, seconds: float = 10.0) -> None:
    """Return when no operation of a backward that has failed runs on `device`. Not to be called within a backward.

    ``loss.backward()`` raises as soon as one thread of autograd has failed. The thread of each device first ends the
    operation that it is in, which may be the recompute of a unit, and calls its hooks. It has one queue, so another
    backward on that device ends after it. That operation may be a collective which waits for this very process, so the
    wait is bounded.
    """
    if device.type == "cpu":
        return  # the thread that called `backward` has computed all of it

    def follow() -> None:
        with suppress(RuntimeError):  # a device that has failed runs nothing more
            start = torch.empty(0, device=device, requires_grad=True)  # no bytes: memory may be full
            torch.autograd.grad(start.clone(), start, torch.empty_like(start))

    follower = threading.Thread(target=follow, name="lightning_cxl_follow", daemon=True)
    follower.start()
    follower.join(seconds)


Peek = Callable[[nn.Module], Iterable[Tensor]]
"""Yields the parameters of a module and its children without waiting for updates of them."""


class ModuleZeroGrad(ReplacedMethod):
    """Stands in for one module's `zero_grad`. A copy of the module has none."""

    def __init__(self, module: nn.Module, grads: GradientOffload, peek: Peek) -> None:
        super().__init__(module.zero_grad)
        self._module = module
        self._grads = grads
        self._peek = peek
        self.own = vars(module).get("zero_grad")  # the user's method, which is called and put back

    def __call__(self, *args: Any, **keywords: Any) -> None:
        set_to_none = args[0] if args else keywords.get("set_to_none", True)
        if set_to_none and self.own is None and type(self._module).zero_grad is nn.Module.zero_grad:
            # no wait for updates, which have their own references: some loops call this right after the step
            parameters = list(self._peek(self._module))
            self._grads.zero(parameters)
            for parameter in parameters:
                parameter.grad = None
        else:
            self._grads.zero(self._module.parameters())
            self._plain(*args, **keywords)


def attach_zero_grad(model: nn.Module, grads: GradientOffload, peek: Peek) -> None:
    for module in model.modules():
        module.__dict__["zero_grad"] = ModuleZeroGrad(module, grads, peek)


def detach_zero_grad(model: nn.Module) -> None:
    for module in model.modules():
        ours = vars(module).get("zero_grad")
        if isinstance(ours, ModuleZeroGrad):
            del module.__dict__["zero_grad"]
            if ours.own is not None:
                module.__dict__["zero_grad"] = ours.own
