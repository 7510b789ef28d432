"""`GradientSink`: every gradient that autograd delivers passes here, and ends up on the host, as ``.grad``.

[Note: Life of a gradient]
The way of one gradient, file by file. Each object calls the next one; `run/` builds them in the order 4, 3, 5, 2.

1. Autograd adds what it has computed for a parameter to ``p.grad`` and calls our hook (`gradients/grad_hooks.py`):
   once per backward, or once per use of a parameter that has changed its device between uses (see
   [Note: Which hooks stay]).
2. `GradientSink` (`gradients/sink.py`) decides by where the parameter and its master are (see
   [Note: Compute and master weights]). On the host it adds the gradient up at once (`gradients/sums.py`):

   * shared, always on the host: the gradient moves into memory of ours, which becomes ``p.grad``, unless it lies on its
     tier already (*in place*). Autograd itself adds later ones to it in float32; in 16 bits we do (*set aside*).
   * separate master, the host computes: it is kept, moved or added at once, and becomes ``master.grad``.

3. From a device (streamed weights, or the master of what is on the device) it goes to `ArrivedGradients`
   (`gradients/arrived.py`), which keeps account of it until somebody gets it.
4. It *leaves* the device with the gradients of its unit (`gradients/leaving.py`, [Note: Leaving gradients]), and is
   *folded* into the sum so far on the host (`gradients/sums.py`), measured meanwhile ([Note: Measured gradients]).
5. If updates run behind the backward, `UnitUpdates` (`updates/unit_updates.py`) is told when a unit is over, and is
   *handed* its gradients: they never become ``.grad`` ([Note: Overlapped updates]). More gradients for such a
   parameter, in the same step, are refused: they would be lost.
6. All others are *complete* at the end of a backward: they become ``master.grad``. See below for when.
7. The step (`updates/host_step.py`, [Note: A step]) has the guard look at them (`gradients/overflow.py`), lets the
   optimizer update the masters, and writes the masters back to the model (`optim/masters.py`). ``zero_grad`` frees the
   gradients.

Details:

* Whether a step is accumulating, ``.grad`` of the master alone says: None means that the next gradient is the first. So
  ``zero_grad``, ``p.grad = None`` and user code that edits gradients keep their meaning.
* In place: where all memory is of the tier that a gradient belongs on, it stays where autograd has made it, and is only
  counted. It moves where others can reach its memory: a larger tensor that it is a view of, or another gradient.
* Set aside (`gradients/aside.py`): 16-bit sums by autograd would be rounded to nearest every time and lose small
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

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, cast

import torch

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.gradients.arrived import ArrivedGradients
from lightning_cxl.gradients.aside import Aside
from lightning_cxl.gradients.failed_backward import wait_for_failed_backward
from lightning_cxl.gradients.grad_hooks import GradientHooks
from lightning_cxl.gradients.sums import GradientSums
from lightning_cxl.optim.masters import WeightPair
from lightning_cxl.optim.number_formats import mix_key
from lightning_cxl.shards import is_sharded, local
from lightning_cxl.torch_private import at_end_of_backward, backward_id, plain_grad, set_plain_grad
from lightning_cxl.transfer.engine import TransferEngine

_HALF = (torch.bfloat16, torch.float16)


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
        engine: its device is where gradients come from.
        sums: of what is added up on the host.
        arrived: keeps account of what comes from the device.
        updates: learns what has come.
        bring_home: lets every streamed parameter show its home.
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
        """Receive the gradients of these parameters from now on (each is watched once).

        Raises:
            TierFullError: there is no room for gradients that move; found out here, before any backward.
        """
        new = [pair for pair in pairs if id(pair.compute) not in self._watched]
        reserved = [
            self._sums.new(group, [pair.grad_dtype for pair in group])
            for group in self._by_unit(pair for pair in new if pair.compute.requires_grad and self._moves(pair))
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

    def _moves(self, pair: WeightPair) -> bool:
        """Whether the first gradient of a step moves into memory of ours."""
        return self._leaves(pair) or not self._sums.stays(pair)

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
        """Learn that no backward of the step comes any more; return when gradients are where the optimizer reads.

        Raises:
            UnsupportedError: the user has assigned the gradient of a shard whose master is separate.
        """
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
