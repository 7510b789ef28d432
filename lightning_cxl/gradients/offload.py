"""`GradientSink`: every gradient that autograd delivers passes here, and ends up on the host, as ``.grad``.

[Note: Life of a gradient]
The way of one gradient. Each object calls the next one; `run/` builds them in the order 4, 3, 5, 2.

1. Autograd adds what it has computed for a parameter to ``p.grad`` and calls our hook (`gradients/meter.py`):
   once per backward, or once per use of a parameter that has changed its device between uses (see
   [Note: Which hooks stay]).
2. `GradientSink` decides by where the parameter and its master are (see [Note: Compute and master weights]). On the
   host it adds the gradient up at once (`GradientSums`):

   * shared, always on the host: the gradient moves into memory of ours, which becomes ``p.grad``.
     Autograd itself adds later ones to it in float32; in 16 bits we do (*set aside*).
   * separate master, the host computes: it is moved or added at once, and becomes ``master.grad``.

3. From a device (streamed weights, or the master of what is on the device) it goes to `ArrivedGradients`,
   which keeps account of it until somebody gets it.
4. It *leaves* the device with the gradients of its unit (`LeavingGradients`, [Note: Leaving gradients]), and is
   *folded* into the sum so far on the host (`GradientSums`), measured meanwhile ([Note: Measured gradients]).
5. If updates run behind the backward, `UnitUpdates` (`updates/step.py`) is told when a unit is over, and is
   *handed* its gradients: they never become ``.grad`` ([Note: Overlapped updates]). More gradients for such a
   parameter, in the same step, are refused: they would be lost.
6. All others are *complete* at the end of a backward: they become ``master.grad``. See below for when.
7. The step (`updates/step.py`, [Note: A step]) has the guard look at them (`gradients/guard.py`), lets the
   optimizer update the masters, and writes the masters back to the model (`optim/masters.py`). ``zero_grad`` frees the
   gradients.

Details:

* Whether a step is accumulating, ``.grad`` of the master alone says: None means that the next gradient is the first. So
  ``zero_grad``, ``p.grad = None`` and user code that edits gradients keep their meaning.
* Set aside (`Aside`): 16-bit sums by autograd would be rounded to nearest every time and lose small
  gradients. So a hook before the accumulation takes ``p.grad`` away, autograd delivers the new one alone, and we add it
  in float32. Of sharded parameters, whose gradients FSDP2 delivers, all are taken away when a backward begins.
* Leave: the parameter shows its home again before the copy is done; ``.grad`` so far is taken away meanwhile, as it is
  on the host. A gradient that no longer is in ``.grad`` is in exactly one place: in `LeavingGradients`, or in
  `GradientSums.so_far`.
* Fold: the first gradient of a step is kept where it landed, others are added: a second 16-bit one makes the sum
  float32, or stays bfloat16, rounded stochastically (``accumulate="bf16"``). `CPUAdam` reads 16-bit gradients as they
  are, other optimizers get float32.
* Complete: at the end of a backward, which autograd tells us, if it is the last of a step or somebody may read
  gradients between micro-batches (`are_read_early`). Else they may be on their way until the step, or until somebody
  looks at parameters (`someone_looks`): through a module, or through an optimizer's groups, as ``zero_grad`` does, or
  at ``.grad`` where the master is separate. A parameter that streams, and is reached in neither way, has None. A
  backward that fails does not come to its end: what it has left behind is dropped when the next one starts.
* Gradient memory belongs to ``.grad`` alone: nothing else keeps it, so whoever holds an old gradient keeps its values,
  and ``zero_grad`` gives the bytes back. What is ours is known by the tensor itself: memory that was given back may be
  anybody's.
* Gradients are numbered as autograd delivers them, which does not depend on when copies are done. The random bits of a
  sum depend on that number.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.gradients.guard import ReplacedMethod
from lightning_cxl.gradients.meter import Addition, GradientHooks, GradientMeter
from lightning_cxl.optim.masters import WeightPair, is_on_host
from lightning_cxl.optim.number_formats import mix_key
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.shards import is_replicated, is_sharded, local, sharded_like
from lightning_cxl.torch_private import at_end_of_backward, backward_id, plain_grad, set_plain_grad
from lightning_cxl.transfer.engine import Transfer, TransferEngine

# ----------------------------------------------------------------------------------------------------
# `GradientSums`: what gradients of a step come to so far, in host memory that the policy placed.

AllocateAll = Callable[[Sequence[tuple[Parameter, torch.dtype]], TensorRole], list[torch.Tensor]]
"""Returns uninitialised host tensors like compute parameters, those of one placement in one piece of memory."""
_HALF = (torch.bfloat16, torch.float16)


class Landed(NamedTuple):
    """A gradient that is on the host now."""

    pair: WeightPair
    grad: torch.Tensor
    key: int
    """Of stochastic rounding."""
    stays: bool
    """It is the first of a step and lies in memory of ours already."""


class GradientSums:
    """Adds gradients up: the first of a step is kept or moved into memory of ours, others are added to it.

    Args:
        half_sums: whether bfloat16 gradients are added up in bfloat16 instead of float32.
    """

    def __init__(
        self,
        allocate_all: AllocateAll,
        meter: GradientMeter,
        *,
        half_sums: bool = False,
    ) -> None:
        self._allocate_all = allocate_all
        self._meter = meter
        self._half_sums = half_sums
        self.so_far: dict[int, torch.Tensor] = {}
        """By id of the pair, while its ``master.grad`` is None because more is on its way."""
        self._own: dict[int, weakref.ref[torch.Tensor]] = {}  # by id of the pair

    def is_ours(self, pair: WeightPair, grad: torch.Tensor) -> bool:
        """Return whether `grad` is the very tensor that was given out, or kept, last for the gradient of `pair`."""
        own = self._own.get(id(pair))
        return own is not None and own() is grad

    def new(self, pairs: Sequence[WeightPair], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Return memory where gradients stay."""
        memory: dict[int, torch.Tensor] = {}
        for role in (TensorRole.COMPUTE_GRADS, TensorRole.MASTER_GRADS):
            wanted = [(pair, dtype) for pair, dtype in zip(pairs, dtypes, strict=True) if _role_of(pair) is role]
            if wanted:
                given = self._allocate_all([(pair.compute, dtype) for pair, dtype in wanted], role)
                memory.update(
                    {id(pair): sharded_like(own, pair.compute) for (pair, _), own in zip(wanted, given, strict=True)}
                )
        self._own.update({key: weakref.ref(tensor) for key, tensor in memory.items()})
        return [memory[id(pair)] for pair in pairs]

    def first(self, pair: WeightPair, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the first gradient of a step, which autograd has made on the host, in memory of ours."""
        return self._moved([pair], [grad], [dtype])[0]

    def add(self, pair: WeightPair, before: torch.Tensor, grad: torch.Tensor, key: int) -> torch.Tensor:
        """Return `before` plus `grad`, in the memory of `before` or in wider memory."""
        return self._added([Landed(pair, grad, key, stays=False)], [before])[0]

    @torch.no_grad()
    def fold(self, landed: Sequence[Landed]) -> None:
        """Take gradients of different parameters in: `so_far` is complete then."""
        news: list[Landed] = []
        later: list[Landed] = []
        for each in landed:
            (later if id(each.pair) in self.so_far else news).append(each)
        staying = [each for each in news if each.stays]
        self._meter.sums([each.grad for each in staying])
        self.so_far.update({id(each.pair): each.grad for each in staying})
        moving = [each for each in news if not each.stays]
        if moving:
            pairs = [each.pair for each in moving]
            moved = self._moved(pairs, [each.grad for each in moving], [pair.grad_dtype for pair in pairs])
            self.so_far.update({id(pair): grad for pair, grad in zip(pairs, moved, strict=True)})
        if later:
            sums = self._added(later, [self.so_far[id(each.pair)] for each in later])
            self.so_far.update({id(each.pair): total for each, total in zip(later, sums, strict=True)})

    def _moved(
        self, pairs: Sequence[WeightPair], grads: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor]:
        memory = self.new(pairs, dtypes)
        self._meter.copy_all(list(zip(grads, memory, strict=True)))
        return memory

    def _added(self, landed: Sequence[Landed], before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sums = dict(enumerate(before))
        widened = [index for index, grad in sums.items() if grad.dtype in _HALF and not self._keeps_half(grad)]
        if widened:
            pairs, grads = [landed[index].pair for index in widened], [before[index] for index in widened]
            sums.update(zip(widened, self._moved(pairs, grads, [torch.float32] * len(widened)), strict=True))
        totals = [sums[index] for index in range(len(landed))]
        self._meter.accumulate_all(
            [Addition(each.grad, total, each.key) for each, total in zip(landed, totals, strict=True)]
        )
        return totals

    def _keeps_half(self, grad: torch.Tensor) -> bool:
        return self._half_sums and grad.dtype is torch.bfloat16


def _role_of(pair: WeightPair) -> TensorRole:
    return TensorRole.COMPUTE_GRADS if pair.is_same_memory else TensorRole.MASTER_GRADS


# ----------------------------------------------------------------------------------------------------
# `LeavingGradients`: gradients of one unit leave the device together, and are folded into the sums together.
#
# [Note: Leaving gradients]
# A *group* is the gradients of one unit, or a single one of a parameter that belongs to none. It leaves when it is
# complete, when the gradient of another group comes, or when its unit or the backward is over; what comes later makes a
# group of its own. A group takes one piece of host memory per placement, copies with one event behind them, and one
# fold (`GradientSums.fold`) that waits for them: on the worker, if there is one, else by whoever asks for it. Folds are
# done in the order in which groups left, so that what is added to what does not depend on time.
#
# * Where it lands. The first gradient of a step lands where it stays. Others, and those of another type than the one
#   that is kept, land in staging memory; at most `MAX_STAGED` groups do, and who would need more waits for the oldest.
# * On the device a gradient is held from its arrival until its copy is done: autograd would add to it in place else.
#   The host may be far ahead, so "done" is what the device knows, not the host: its computing stream waits for the
#   oldest group while more than the bytes of the largest one are leaving ([Note: Copies and streams]). So the device
#   holds what leaves, no more than the largest group, and the group that is being computed.

MAX_STAGED = 3
"""Groups in staging memory at most: one lands, one is folded, one is slack."""


@dataclass(slots=True, eq=False)
class Gradient:
    """A gradient that autograd has delivered: strided, and not changed by anyone from now on."""

    pair: WeightPair
    grad: torch.Tensor
    key: int
    """Random key of stochastic rounding."""
    is_first: bool
    """Whether it is the first gradient of its parameter in a step."""


class _Fold(Protocol):
    def done(self) -> bool: ...
    def result(self) -> None: ...


@dataclass(slots=True, eq=False)
class Group:
    """Gradients that have left together."""

    pair_ids: frozenset[int]
    is_staged: bool
    """Some are in staging memory until they are folded."""
    fold: _Fold


class LeavingGradients:
    """Sends gradients to the host. See [Note: Leaving gradients].

    Args:
        worker: folds, one group after the other; None leaves it to whoever asks.
    """

    def __init__(
        self,
        engine: TransferEngine,
        allocate_all: AllocateAll,
        sums: GradientSums,
        worker: Executor | None,
    ) -> None:
        self._engine = engine
        self._allocate_all = allocate_all
        self._sums = sums
        self._worker = worker
        self._unit: object = None  # whose group is not complete
        self._size = 1  # of that group when it is
        self._waiting: dict[int, Gradient] = {}  # what there is of it, by id of the pair
        self._left: deque[Group] = deque()  # not known to be folded
        self._on_device: deque[tuple[Transfer, int]] = deque()  # that the device has not waited for, and their bytes
        self._device_bytes = self._largest_bytes = 0

    def add(self, gradient: Gradient, unit: object, unit_size: int) -> None:
        """Let a gradient leave, with the others of its unit."""
        key = id(gradient.pair)
        if unit is not self._unit or key in self._waiting:
            self.leave()
        if not self._waiting:
            self._unit, self._size = unit, unit_size
        self._waiting[key] = gradient
        if len(self._waiting) >= self._size:
            self.leave()

    def leave(self) -> None:
        """Let gradients leave that still wait for other gradients of their unit."""
        group, self._waiting = list(self._waiting.values()), {}
        if not group:
            return
        staying: list[Gradient] = []
        staged: list[Gradient] = []
        for each in group:
            (staying if each.is_first and each.grad.dtype is each.pair.grad_dtype else staged).append(each)
        while staged and sum(each.is_staged for each in self._left) >= MAX_STAGED:
            self._left.popleft().fold.result()
        memory = self._sums.new([each.pair for each in staying], [each.grad.dtype for each in staying])
        if staged:
            memory += self._allocate_all([(each.pair.compute, each.grad.dtype) for each in staged], TensorRole.STAGING)
        leaving = staying + staged
        landed = [
            Landed(each.pair, there, each.key, stays=index < len(staying))
            for index, (each, there) in enumerate(zip(leaving, memory, strict=True))
        ]
        copies = [(each.grad, local(there)) for each, there in zip(leaving, memory, strict=True)]
        # FSDP2 allocates on the stream that scatters, and calls hooks on the one that reduces over machines
        transfer = self._start(copies, from_here=not any(is_replicated(each.pair.compute) for each in leaving))
        fold = partial(self._fold, transfer, landed)
        started = _OwnFold(transfer, fold) if self._worker is None else self._worker.submit(fold)
        self._left.append(Group(frozenset(id(each.pair) for each in group), bool(staged), started))
        while self._left and self._left[0].fold.done():
            self._left.popleft().fold.result()

    def _start(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], from_here: bool) -> Transfer:
        transfer = self._engine.d2h_all(copies, from_here=from_here)
        nbytes = sum(source.nbytes for source, _ in copies)
        self._on_device.append((transfer, nbytes))
        self._device_bytes += nbytes
        self._largest_bytes = max(self._largest_bytes, nbytes)
        while self._device_bytes > self._largest_bytes:
            oldest, nbytes = self._on_device.popleft()
            oldest.wait()
            self._device_bytes -= nbytes
        return transfer

    def _fold(self, transfer: Transfer, landed: Sequence[Landed]) -> None:
        transfer.wait_host()
        self._sums.fold(landed)

    def claim(self, pair_ids: Collection[int]) -> list[Group]:
        """Return the groups that hold gradients of these; those that hold no others are the caller's to wait for."""
        self.leave()
        claimed = [group for group in self._left if not group.pair_ids.isdisjoint(pair_ids)]
        self._left = deque(group for group in self._left if not group.pair_ids.issubset(pair_ids))
        return claimed

    def settle(self) -> None:
        """Return when all are folded; raises what went wrong first."""
        self.leave()
        while self._left:
            self._left.popleft().fold.result()

    def forget(self) -> None:
        """Let go of those that wait for others of their unit, which will not come: the backward has failed."""
        self._waiting = {}

    def close(self) -> None:
        """Let go of everything; nothing that still runs is waited for."""
        self._waiting = {}
        self._left.clear()
        self._on_device.clear()


class _OwnFold:
    """Done by whoever asks for the result first."""

    def __init__(self, transfer: Transfer, fold: Callable[[], None]) -> None:
        self._transfer = transfer
        self._fold: Callable[[], None] | None = fold

    def done(self) -> bool:
        return self._transfer.done()

    def result(self) -> None:
        fold, self._fold = self._fold, None
        if fold is not None:
            fold()


# ----------------------------------------------------------------------------------------------------
# `ArrivedGradients`: gradients that came from the device since gradients were complete, until somebody gets them.
#
# They are completed (they become ``.grad`` of the masters), or handed over to an update that runs behind the backward
# ([Note: Overlapped updates]), or forgotten when the backward has failed.


class ArrivedGradients:
    """Keeps account of gradients on their way from the device. See [Note: Life of a gradient]."""

    def __init__(self, leaving: LeavingGradients, sums: GradientSums) -> None:
        self._leaving = leaving
        self._sums = sums
        self._pairs: dict[int, WeightPair] = {}  # whose gradient came, or was taken away for it, by id
        self._handed: dict[int, list[Group]] = {}  # of gradients that someone else takes care of, by id of the pair
        self._given: set[int] = set()  # ids of pairs handed over in this step

    def __contains__(self, pair: WeightPair) -> bool:
        """Whether the gradient of `pair` is here, in part or as a whole, and not in ``.grad``."""
        return id(pair) in self._pairs

    def take_away(self, pair: WeightPair) -> bool:
        """Take the gradient so far out of ``.grad``, once; return whether that was done now."""
        if id(pair) in self._pairs:
            return False  # of an earlier backward, or of another use of the parameter
        grad = pair.master.grad
        if grad is None or grad.layout is not torch.strided or grad.requires_grad:
            return False
        self._sums.so_far[id(pair)], pair.master.grad = grad, None
        self._pairs[id(pair)] = pair
        return True

    def add(self, pair: WeightPair, grad: torch.Tensor, key: int, unit: object, unit_size: int) -> None:
        """Let a gradient leave the device.

        Args:
            unit: of the parameter; None for a parameter that belongs to none.
        """
        is_first = id(pair) not in self._pairs
        self._pairs[id(pair)] = pair
        self._leaving.add(Gradient(pair, grad, key, is_first), unit, unit_size)

    def leave(self) -> None:
        """Let gradients leave that still wait for other gradients of their unit."""
        self._leaving.leave()

    def step_is_over(self) -> None:
        """Learn that what was handed over has no more gradients to come in this step."""
        self._given.clear()

    def was_given(self, pair: WeightPair) -> bool:
        """Return whether a gradient of `pair` was handed over in this step."""
        return id(pair) in self._given

    def hand_over(self, candidates: Iterable[WeightPair]) -> list[WeightPair]:
        """Return those of the candidates whose gradients have come from the device, as they came.

        The caller then gets each of these gradients with `take`; `complete` leaves them out.
        """
        own = {id(pair) for pair in candidates}
        pairs = [pair for key, pair in self._pairs.items() if key in own]
        own = {id(pair) for pair in pairs}
        groups = self._leaving.claim(own)
        for key in own:
            del self._pairs[key]
            self._handed[key] = [group for group in groups if key in group.pair_ids]
        self._given |= own
        return pairs

    def take(self, pair: WeightPair) -> torch.Tensor:
        """Return a gradient that was handed over, on the worker: after it has been folded; raises its error."""
        for group in self._handed.pop(id(pair)):
            group.fold.result()
        return self._sums.so_far.pop(id(pair))

    def can_be_shown(self) -> bool:
        """Return whether every master is on the host, as torch takes a gradient beside its parameter only."""
        return all(is_on_host(pair.master) for pair in self._pairs.values())

    def complete(self) -> None:
        """Return when every gradient that has come is where the optimizer reads it."""
        self._leaving.settle()
        for pair in self._pairs.values():
            pair.master.grad = self._sums.so_far.pop(id(pair))
        self._pairs.clear()

    def forget(self) -> None:
        """Drop the gradients that a failed backward has left here."""
        self._leaving.forget()
        self._leaving.settle()
        for key in self._pairs:
            self._sums.so_far.pop(key, None)
        self._pairs.clear()

    def close(self) -> None:
        """Let go of everything; nothing that still runs is waited for."""
        self._leaving.close()
        for state in (self._pairs, self._handed, self._sums.so_far):
            state.clear()


# ----------------------------------------------------------------------------------------------------
# `Aside`: gradients so far, kept out of sight while the next one comes alone. See [Note: Life of a gradient].


class Aside:
    """Takes ``.grad`` of shared parameters away before somebody else would add to it, and gives it back."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[WeightPair, torch.Tensor]] = {}  # by id of the pair

    def __contains__(self, pair: WeightPair) -> bool:
        return id(pair) in self._kept

    def take(self, pair: WeightPair) -> None:
        """Take the gradient so far away, if it is one that more can be added to."""
        self._kept.pop(id(pair), None)  # of a backward that failed: the user may have zeroed gradients since
        grad = pair.master.grad
        if grad is not None and grad.layout is torch.strided and not grad.requires_grad:
            self._kept[id(pair)], pair.master.grad = (pair, grad), None

    def pop(self, pair: WeightPair) -> torch.Tensor | None:
        """Return the gradient so far, and keep it no longer."""
        _, grad = self._kept.pop(id(pair), (None, None))
        return grad

    def begin(self, pairs: Iterable[WeightPair]) -> None:
        """Forget what a backward that failed has left, and take the gradients of these pairs away."""
        self._kept.clear()
        for pair in pairs:
            self.take(pair)

    def give_back(self) -> None:
        """Give back the gradients of all pairs for which no other has come."""
        while self._kept:
            _, (pair, grad) = self._kept.popitem()
            pair.master.grad = grad

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()


# ----------------------------------------------------------------------------------------------------
# `wait_for_failed_backward`: a backward that has raised in one thread may still run in another.


def wait_for_failed_backward(device: torch.device, seconds: float = 10.0) -> None:
    """Return when no operation of a backward that has failed runs on `device`, or after `seconds`.

    ``loss.backward()`` raises as soon as one thread of autograd has failed. The thread of each device first ends the
    operation that it is in, which may be the recompute of a unit, and calls its hooks. It has one queue, so another
    backward on that device ends after it. Not to be called within a backward.

    Args:
        seconds: the wait is bounded because that operation may be a collective which waits for this very process.
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


class BackwardUpdates(Protocol):
    """What may update parameters while the backward runs. See [Note: Overlapped updates]."""

    def begin_backward(self) -> None:
        """Learn that a backward begins."""

    def resident_has_come(self, pair: WeightPair) -> None:
        """Learn that the gradient of a parameter that does not stream has left the device."""

    def unit_is_over(self, unit: Any) -> None:
        """Learn that the backward of a streamed unit is over, and that its weights are at home."""


class GradientSink:
    """Receives the gradients of adopted parameters.

    Args:
        streamed: the unit of each parameter whose weights visit the device, by the parameter's id.
        reserves_streamed: whether `watch` makes sure that there is room for the gradients of all streamed parameters
            at once.
        are_read_early: whether someone may read gradients between the micro-batches of a step. If not, they may be on
            their way until the last backward of the step is over.
    """

    def __init__(
        self,
        engine: TransferEngine,
        sums: GradientSums,
        arrived: ArrivedGradients,
        updates: BackwardUpdates,
        bring_home: Callable[[], None],
        streamed: Mapping[int, object],
        *,
        reserves_streamed: bool = True,
        are_read_early: bool = True,
    ) -> None:
        self._engine = engine
        self._sums = sums
        self._arrived = arrived
        self._updates = updates
        self._bring_home = bring_home
        self._streamed = streamed
        self._reserves_streamed = reserves_streamed
        self._are_read_early = are_read_early
        self._is_last_backward = False  # of a step: its optimizer has asked for it
        self.num_received = 0
        """Gradients so far: makes every stochastic rounding another one."""
        self._watched: dict[int, tuple[WeightPair, GradientHooks]] = {}  # by id of the compute parameter
        self._units: dict[int, list[WeightPair]] = {}  # what is watched of each unit, by the unit's id
        self._aside = Aside()  # of shared parameters that stay on the host, while the next gradient is delivered
        self._backward: int | None = None  # that `finish` will be called for
        self._may_run = False  # a backward, in any thread: also one that failed before any hook of ours was called

    def watch(self, pairs: list[WeightPair]) -> None:
        """Receive the gradients of these parameters from now on (each is watched once)."""
        new = [pair for pair in pairs if id(pair.compute) not in self._watched]
        reserved = [
            self._sums.new(group, [pair.grad_dtype for pair in group])
            for group in self._by_unit(pair for pair in new if pair.compute.requires_grad)
        ]
        for pair in new:
            half = pair.master.dtype in _HALF or pair.grad_dtype in _HALF
            if half:
                cast(Any, pair.master).grad_dtype = None
            if self._leaves(pair):
                receive, before = partial(self._receive, pair), partial(self._take_away, pair)
                hooks = GradientHooks(pair.compute, receive, before, stays=False)
            elif pair.is_shared:  # hooks of the user find in `.grad` what autograd alone would have put there
                taking = partial(self._aside.take, pair) if half and not is_sharded(pair.compute) else None
                hooks = GradientHooks(pair.compute, partial(self._receive_shared, pair), taking, stays=True)
            else:
                hooks = GradientHooks(pair.compute, partial(self._receive_separate, pair), stays=False)
            pair.put_front(self.someone_looks)
            self._watched[id(pair.compute)] = (pair, hooks)
            self._units.setdefault(id(self._unit_of(pair)), []).append(pair)
        del reserved  # back to the pool, which keeps the pages for the first backward

    def _unit_of(self, pair: WeightPair) -> object:
        return self._streamed.get(id(pair.compute))

    def _by_unit(self, pairs: Iterable[WeightPair]) -> list[list[WeightPair]]:
        """Return pairs in groups as their gradients leave, without those that have no room reserved."""
        groups: dict[int, list[WeightPair]] = {}
        for pair in pairs:
            unit = self._unit_of(pair)
            if unit is None:
                groups[id(pair)] = [pair]
            elif self._reserves_streamed:
                groups.setdefault(id(unit), []).append(pair)
        return list(groups.values())

    def _num_trained(self, unit: object) -> int:
        return sum(pair.compute.requires_grad for pair in self._units[id(unit)])

    def _leaves(self, pair: WeightPair) -> bool:
        """Whether gradients come from the device."""
        return id(pair.compute) in self._streamed or not (pair.is_shared or self._engine.computes_on_host)

    def _receive_shared(self, pair: WeightPair) -> None:
        grad, before, key = pair.compute.grad, self._aside.pop(pair), self._next_key()
        if grad is None or grad.layout is not torch.strided or grad.requires_grad:
            # nothing, sparse (the user's own optimizer understands it), or part of a graph (create_graph=True)
            if before is not None:
                with torch.enable_grad():
                    pair.compute.grad = before if grad is None else before + grad
            return
        if before is not None:
            pair.compute.grad = self._sums.add(pair, before, grad, key)
        elif not self._sums.is_ours(pair, grad):  # else autograd added it in place
            pair.compute.grad = self._sums.first(pair, grad, grad.dtype)
        elif is_sharded(grad):  # or FSDP2 did, which leaves no trace
            torch.autograd.graph.increment_version([grad])

    def _receive_separate(self, pair: WeightPair) -> None:
        grad = _taken_from(pair)
        if grad is None or not pair.master.requires_grad:
            return
        before, key = pair.master.grad, self._next_key()
        if before is None:
            pair.master.grad = self._sums.first(pair, grad, pair.grad_dtype)
        else:
            pair.master.grad = self._sums.add(pair, before, grad, key)

    def _take_away(self, pair: WeightPair) -> None:
        if self._arrived.take_away(pair):
            self.finish_at_the_end()  # also if nothing arrives, because `torch.autograd.grad` takes it

    def _receive(self, pair: WeightPair) -> None:
        grad = _taken_from(pair)
        if grad is None or not (pair.is_shared or pair.master.requires_grad):
            return
        grad = local(grad)
        self.finish_at_the_end()  # before anything that may fail: `bring_home` waits for this backward then
        self._check(pair, grad)
        self._take_away(pair)
        unit = self._unit_of(pair)
        unit_size = 1 if unit is None else self._num_trained(unit)
        self._arrived.add(pair, grad, self._next_key(), unit, unit_size)
        if unit is None:
            self._updates.resident_has_come(pair)

    def _check(self, pair: WeightPair, grad: torch.Tensor) -> None:
        if grad.device != (device := self._engine.device):
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
        if self._arrived.was_given(pair):
            raise UnsupportedError(
                f"`{pair.name}` got a gradient after its update had begun: it is used outside of its unit, or the step "
                "runs several backwards. Set `overlap_step=False`, so that updates wait for the end of the backward"
            )

    def _next_key(self) -> int:
        self.num_received += 1
        return mix_key(self.num_received)

    def bring_home(self) -> None:
        """Let every streamed parameter show its home; between backwards, of which the last one may have failed."""
        if self._may_run:
            wait_for_failed_backward(self._engine.device)  # else a gradient may come after its weight has left
            self._may_run = False  # nobody waits twice
        self._bring_home()

    # -- what a backward tells, in this order

    def start_backward(self) -> None:
        """Forget what a backward that failed left behind; another one begins."""
        self.bring_home()
        self._aside.begin(pair for pair, _ in self._watched.values() if pair.is_shared and is_sharded(pair.compute))
        if self._backward is not None:
            self._arrived.forget()
        self._backward, self._may_run = None, True
        self._updates.begin_backward()

    def recompute_begins(self) -> None:
        """Learn that a unit is about to be recomputed.

        A backward inside of it, such as a reentrant checkpoint's, ends while weights are still read. So the backward
        that ends last, this one, is the one that `finish` waits for.
        """
        self.finish_at_the_end()

    def finish_at_the_end(self) -> None:
        """Let `loss.backward()` return with complete gradients, whoever called it; not where it fails."""
        backward = backward_id()
        if self._backward is None and backward is not None:
            self._backward, self._may_run = backward, True
            at_end_of_backward(self.finish)

    def unit_is_over(self, unit: object) -> None:
        """Learn that the backward of a streamed unit is over: its gradients have come."""
        self._updates.unit_is_over(unit)

    def finish(self) -> None:
        """Note that a backward is over: its gradients are complete now, or on their way if nobody reads them yet."""
        self._bring_home()
        self._aside.give_back()
        self._arrived.leave()
        if self._are_read_early or self._is_last_backward:
            self._arrived.complete()
        self._backward, self._may_run = None, False  # not where that fails: the next backward forgets what is left

    # -- what a step tells

    def begin_step(self) -> None:
        """Learn that the next backward is the last of a step: gradients are read when it is over."""
        self._is_last_backward = True
        self._arrived.step_is_over()  # the one before: its closure may have failed

    def end_step(self) -> None:
        """Learn that no backward of the step comes any more; return when gradients are where the optimizer reads."""
        for pair, _ in self._watched.values():
            if not pair.is_shared and is_sharded(pair.compute) and plain_grad(pair.compute) is not None:
                raise UnsupportedError(
                    f"`{pair.name}` was assigned a gradient (`p.grad = ...`) on the model. With several processes its "
                    "master weights are separate: assign it to the parameter in `optimizer.param_groups`"
                )
        self._is_last_backward = False
        self._arrived.step_is_over()
        self._bring_home()
        self._arrived.complete()

    # -- what others ask

    def someone_looks(self) -> None:
        """Complete the gradients for someone who looks at parameters and may read, edit or zero them.

        Not in the middle of a backward, and not while a unit computes: its weights are on the device.
        """
        if self._backward is None and self._arrived.can_be_shown():
            self._arrived.complete()

    def zero(self, parameters: Iterable[torch.Tensor]) -> None:
        """Complete gradients, which may then be dropped, and forget those of shards, where ``.grad`` is not shown."""
        self._bring_home()
        self._arrived.complete()
        for parameter in parameters:
            pair, _ = self._watched.get(id(parameter), (None, None))
            if pair is not None and not pair.is_shared and is_sharded(pair.compute):
                pair.master.grad = None

    def close(self) -> None:
        """Stop receiving and drop the gradients that live in our memory."""
        for pair, hooks in self._watched.values():
            hooks.remove()
            pair.remove_front()
            grad = pair.master.grad
            is_part = pair in self._aside or pair in self._arrived  # the rest of a backward that failed
            if grad is not None and (is_part or self._sums.is_ours(pair, grad)):
                pair.master.grad = grad = None
            if pair.master.grad_dtype is None and (grad is None or grad.dtype is pair.master.dtype):
                pair.master.grad_dtype = pair.master.dtype
        self._arrived.close()
        self._aside.clear()
        self._watched.clear()
        self._units.clear()


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


# ----------------------------------------------------------------------------------------------------
# `zero_grad` of modules whose updates run behind the next forward, or whose shards have separate masters.

Peek = Callable[[nn.Module], Iterable[Tensor]]
"""Yields the parameters of a module and its children without waiting for updates of them."""


class ModuleZeroGrad(ReplacedMethod):
    """Stands in for one module's `zero_grad`. A copy of the module has none.

    Gradients that are dropped, not zeroed, need no wait: an update that runs has its own references to them. So a loop
    that calls ``model.zero_grad()`` after the step, as that of transformers does, does not wait for updates.
    """

    def __init__(self, module: nn.Module, grads: GradientSink, peek: Peek) -> None:
        super().__init__(module.zero_grad)
        self._module = module
        self._grads = grads
        self._peek = peek
        self.own = vars(module).get("zero_grad")
        """What the user has put on the module, which is called and put back."""

    def __call__(self, *args: Any, **keywords: Any) -> None:
        """Clear the gradients; see `torch.nn.Module.zero_grad`."""
        set_to_none = args[0] if args else keywords.get("set_to_none", True)
        if set_to_none and self.own is None and type(self._module).zero_grad is nn.Module.zero_grad:
            parameters = list(self._peek(self._module))
            self._grads.zero(parameters)
            for parameter in parameters:
                parameter.grad = None
        else:
            self._grads.zero(self._module.parameters())
            self._plain(*args, **keywords)


def attach_zero_grad(model: nn.Module, grads: GradientSink, peek: Peek) -> None:
    """Replace `zero_grad` of a model and of every module in it."""
    for module in model.modules():
        module.__dict__["zero_grad"] = ModuleZeroGrad(module, grads, peek)


def detach_zero_grad(model: nn.Module) -> None:
    """Undo `attach_zero_grad`."""
    for module in model.modules():
        ours = vars(module).get("zero_grad")
        if isinstance(ours, ModuleZeroGrad):
            del module.__dict__["zero_grad"]
            if ours.own is not None:
                module.__dict__["zero_grad"] = ours.own
