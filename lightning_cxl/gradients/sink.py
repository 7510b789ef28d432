"""`GradientSink`: every gradient that autograd delivers passes here, and ends up on the host, as ``.grad``.

[Note: Life of a gradient]
Autograd adds what it has computed for a parameter to ``p.grad`` and then calls our hook: once per backward, or once per
use of a parameter that has changed its device between uses ([Note: Which hooks stay]). What the hook does depends on
where the parameter and its master are ([Note: Compute and master weights]):

======================================  ========================================================================
parameter                               its gradient
======================================  ========================================================================
shared, always on the host              moves into memory of ours, which becomes ``p.grad``; autograd itself adds
                                        later ones to it in float32, we do in 16 bits (*set aside*)
separate master, the host computes      is moved or added at once, and becomes ``master.grad``
streamed, or master of what is on the   *leaves* the device with those of its unit, is *folded* into the sum so far,
device                                  and becomes ``master.grad`` when gradients are *complete*
======================================  ========================================================================

* Whether a step is accumulating, ``.grad`` of the master alone says: None means that the next gradient is the first. So
  ``zero_grad``, ``p.grad = None`` and user code that edits gradients keep their meaning.
* Set aside: 16-bit sums by autograd would be rounded to nearest every time and lose small gradients. So a hook before
  the accumulation takes ``p.grad`` away, autograd delivers the new one alone, and we add it in float32.
* Leave: ([Note: Leaving gradients]). The parameter shows its home again before the copy is done; ``.grad`` so far is
  taken away meanwhile, as it is on the host. A gradient that no longer is in ``.grad`` is in exactly one place: in
  `LeavingGradients`, or in `GradientSums.so_far`.
* Fold: the first gradient of a step is kept where it landed, others are added: a second 16-bit one makes the sum
  float32, or stays bfloat16, rounded stochastically (``accumulate="bf16"``). `CPUAdam` reads 16-bit gradients as they
  are, other optimizers get float32. All are measured meanwhile ([Note: Measured gradients]).
* Complete: at the end of a backward, which autograd tells us, if somebody may read gradients then (`is_read_next`);
  else they may be on their way until the step, or until somebody looks at parameters (`look`): through a module, or
  through an optimizer's groups, as ``zero_grad`` does. Who keeps a parameter of his own finds None. A backward that
  fails does not come to its end: what it has left behind is dropped when the next one starts.
* Handed over: an update that runs behind the backward takes gradients before that, and they never become ``.grad``
  ([Note: Overlapped updates]). More gradients for such a parameter, in the same step, are refused: they would be lost.
* Gradient memory belongs to ``.grad`` alone: nothing else keeps it, so whoever holds an old gradient keeps its values,
  and ``zero_grad`` gives the bytes back to the pool. What is ours is known by the tensor itself: memory that was given
  back may be anybody's.
* Gradients are numbered as autograd delivers them, which does not depend on when copies are done. The random bits of a
  sum depend on that number.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, cast

import torch

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.gradients.grad_hooks import GradientHooks
from lightning_cxl.gradients.leaving import Gradient, Group, LeavingGradients
from lightning_cxl.gradients.meter import GradientMeter
from lightning_cxl.gradients.sums import AllocateAll, GradientSums, one_by_one
from lightning_cxl.optim.masters import AllocateFor, HostParameter, is_on_host
from lightning_cxl.optim.number_formats import mix_key
from lightning_cxl.torch_private import at_end_of_backward, backward_id
from lightning_cxl.transfer.engine import TransferEngine

_HALF = (torch.bfloat16, torch.float16)
_NO_UNITS: Mapping[int, object] = {}


class GradientSink:
    """Receives the gradients of adopted parameters.

    Args:
        engine: starts copies from the device.
        allocate: gives host memory for a role.
        meter: copies, adds and measures.
        half_sums: whether bfloat16 gradients are added up in bfloat16 instead of float32.
        streamed: the unit of each parameter whose weights visit the device, by the parameter's id.
        bring_home: lets all of them show their home; called when gradients have arrived.
        worker: folds what comes from the device, one after the other; None leaves it to the thread of the backward.
        allocate_all: gives host memory for several parameters at once; None asks `allocate` for each.
    """

    def __init__(
        self,
        engine: TransferEngine,
        allocate: AllocateFor,
        meter: GradientMeter,
        *,
        half_sums: bool = False,
        streamed: Mapping[int, object] = _NO_UNITS,
        bring_home: Callable[[], None] = lambda: None,
        worker: Executor | None = None,
        allocate_all: AllocateAll | None = None,
    ) -> None:
        self._engine = engine
        self._streamed = streamed
        self._bring_home = bring_home
        allocate_all = allocate_all or one_by_one(allocate)
        self._sums = GradientSums(allocate_all, meter, half_sums=half_sums)
        self._leaving = LeavingGradients(engine, allocate_all, self._sums, worker, self._num_trained)
        self.num_received = 0
        """Gradients so far: makes every stochastic rounding another one."""
        self.reserves_streamed = True
        """Whether `watch` makes sure that there is room for the gradients of all streamed parameters at once."""
        self.is_read_next = True
        """Whether someone may read gradients when the backward is over; else they may be on their way until a step."""
        self.on_resident: Callable[[HostParameter], None] = _ignore
        """Called with each parameter that does not stream when its gradient has left the device."""
        self._watched: dict[int, tuple[HostParameter, GradientHooks]] = {}  # by id of the compute parameter
        self._units: dict[int, list[HostParameter]] = {}  # what is watched of each unit, by the unit's id
        # of shared parameters that stay on the host: gradients so far, while autograd delivers the next
        self._aside: dict[int, torch.Tensor] = {}
        # since gradients were complete, by id of the host parameter: its gradient came, or was taken away for it
        self._arrived: dict[int, HostParameter] = {}
        self._handed: dict[int, list[Group]] = {}  # of gradients that someone else takes care of
        self._given: set[int] = set()  # ids of host parameters handed over in this step
        self._backward: int | None = None  # that `finish` will be called for

    def watch(self, hosts: list[HostParameter]) -> None:
        """Receive the gradients of these parameters from now on (each is watched once).

        Raises:
            TierFullError: there is no room for their gradients; found out here, before any backward.
        """
        new = [host for host in hosts if id(host.compute) not in self._watched]
        reserved = [
            self._sums.new(group, [host.grad_dtype for host in group])
            for group in self._by_unit(host for host in new if host.compute.requires_grad)
        ]
        for host in new:
            half = host.master.dtype in _HALF or host.grad_dtype in _HALF
            if half:
                cast(Any, host.master).grad_dtype = None
            if self._leaves(host):
                receive, before = partial(self._receive, host), partial(self._take_away, host)
                hooks = GradientHooks(host.compute, receive, before, stays=False)
            elif host.is_shared:  # hooks of the user find in `.grad` what autograd alone would have put there
                taking = partial(self._set_aside, host) if half else None
                hooks = GradientHooks(host.compute, partial(self._receive_shared, host), taking, stays=True)
            else:
                hooks = GradientHooks(host.compute, partial(self._receive_separate, host), stays=False)
            self._watched[id(host.compute)] = (host, hooks)
            self._units.setdefault(id(self._unit_of(host)), []).append(host)
        del reserved  # back to the pool, which keeps the pages for the first backward

    def _unit_of(self, host: HostParameter) -> object:
        return self._streamed.get(id(host.compute))

    def _by_unit(self, hosts: Iterable[HostParameter]) -> list[list[HostParameter]]:
        """Return hosts in groups as their gradients leave, without those that have no room reserved."""
        groups: dict[int, list[HostParameter]] = {}
        for host in hosts:
            unit = self._unit_of(host)
            if unit is None:
                groups[id(host)] = [host]
            elif self.reserves_streamed:
                groups.setdefault(id(unit), []).append(host)
        return list(groups.values())

    def _num_trained(self, unit: object) -> int:
        return sum(host.compute.requires_grad for host in self._units[id(unit)])

    def _leaves(self, host: HostParameter) -> bool:
        """Whether gradients come from the device."""
        return id(host.compute) in self._streamed or not (host.is_shared or self._engine.computes_on_host)

    def _set_aside(self, host: HostParameter) -> None:
        """Keep the gradient so far from autograd's own addition; it comes back when the new one has been added."""
        self._aside.pop(id(host), None)  # of a backward that failed: the user may have zeroed gradients since
        grad = host.master.grad
        if grad is not None and grad.layout is torch.strided and not grad.requires_grad:
            self._aside[id(host)], host.master.grad = grad, None

    def _receive_shared(self, host: HostParameter) -> None:
        grad, before, key = host.compute.grad, self._aside.pop(id(host), None), self._next_key()
        if grad is None or grad.layout is not torch.strided or grad.requires_grad:
            # nothing, sparse (the user's own optimizer understands it), or part of a graph (create_graph=True)
            if before is not None:
                with torch.enable_grad():
                    host.compute.grad = before if grad is None else before + grad
            return
        if before is not None:
            host.compute.grad = self._sums.add(host, before, grad, key)
        elif not self._sums.is_ours(host, grad):  # else autograd added it in place
            host.compute.grad = self._sums.first(host, grad, grad.dtype)

    def _receive_separate(self, host: HostParameter) -> None:
        grad = _taken_from(host.compute)
        if grad is None or not host.master.requires_grad:
            return
        before, key = host.master.grad, self._next_key()
        if before is None:
            host.master.grad = self._sums.first(host, grad, host.grad_dtype)
        else:
            host.master.grad = self._sums.add(host, before, grad, key)

    def _take_away(self, host: HostParameter) -> None:
        """Let the gradient so far be added to what comes from the device; it comes back when gradients are complete."""
        if id(host) in self._arrived:
            return  # of an earlier backward, or of another use of the parameter: it has been taken already
        grad = host.master.grad
        if grad is not None and grad.layout is torch.strided and not grad.requires_grad:
            self._sums.so_far[id(host)], host.master.grad = grad, None
            self._arrived[id(host)] = host
            self.finish_at_the_end()  # also if nothing arrives, because `torch.autograd.grad` takes it

    def _receive(self, host: HostParameter) -> None:
        grad = _taken_from(host.compute)
        if grad is None or not (host.is_shared or host.master.requires_grad):
            return
        self._check(host, grad)
        self.finish_at_the_end()
        self._take_away(host)
        is_first = id(host) not in self._arrived
        self._arrived[id(host)] = host
        unit = self._unit_of(host)
        self._leaving.add(Gradient(host, grad, self._next_key(), is_first), unit)
        if unit is None:
            self.on_resident(host)

    def _check(self, host: HostParameter, grad: torch.Tensor) -> None:
        if grad.device != self._engine.device:
            where = (
                f"`{host.name}` got a gradient on `{grad.device}`, and the model computes on `{self._engine.device}`"
            )
            if id(host.compute) in self._streamed:
                raise UnsupportedError(
                    f"{where}: it was used outside of its unit's forward, where it is on the host. Move that use, such "
                    "as a penalty on weights, into the unit's forward, use weight decay, or set `stream_weights=False`"
                )
            raise UnsupportedError(
                f"{where}: the parameter is on `{host.compute.device}`, so it does not belong to the model, or was "
                "moved. Register it in the module, and leave it where it is"
            )
        if id(host) in self._given:
            raise UnsupportedError(
                f"`{host.name}` got a gradient after its update had begun: it is used outside of its unit, or the step "
                "runs several backwards. Set `overlap_step=False`, or override `on_after_backward`, so that updates "
                "wait for the end of the backward"
            )

    def _next_key(self) -> int:
        self.num_received += 1
        return mix_key(self.num_received)

    def finish_at_the_end(self) -> None:
        """Let `loss.backward()` return with complete gradients, whoever called it; not where it fails.

        A backward inside of it, such as a reentrant checkpoint's, ends while weights are still read: called before.
        """
        backward = backward_id()
        if self._backward is None and backward is not None:
            self._backward = backward
            at_end_of_backward(self.finish)

    def begin_step(self) -> None:
        """Learn that the next backward is the last of a step: gradients are read when it is over."""
        self.is_read_next = True
        self._given.clear()  # of a step whose closure failed

    def end_step(self) -> None:
        """Learn that no backward of the step comes any more; return when gradients are where the optimizer reads."""
        self._given.clear()
        self._bring_home()
        self.complete()

    def hand_over(self, candidates: Iterable[HostParameter]) -> list[HostParameter]:
        """Return those of the candidates whose gradients have come from the device, as they came.

        Who calls this takes care of these gradients, with `take`; `finish` no longer does.
        """
        own = {id(host) for host in candidates}
        hosts = [host for key, host in self._arrived.items() if key in own]
        own = {id(host) for host in hosts}
        groups = self._leaving.claim(own)
        for key in own:
            del self._arrived[key]
            self._handed[key] = [group for group in groups if key in group.hosts]
        self._given |= own
        return hosts

    def take(self, host: HostParameter) -> torch.Tensor:
        """Return a gradient that was handed over, on the worker: after it has been folded; raises its error."""
        for group in self._handed.pop(id(host)):
            group.fold.result()
        return self._sums.so_far.pop(id(host))

    def start_backward(self) -> None:
        """Forget what a backward that failed left behind."""
        self._bring_home()
        self._aside.clear()
        if self._backward is not None:
            self._forget()

    def finish(self) -> None:
        """Note that a backward is over: its gradients are complete now, or on their way if nobody reads them yet."""
        self._bring_home()
        self._leaving.leave()
        if self.is_read_next:
            self.complete()
        self._backward = None  # not where that fails: the next backward forgets what is left then

    def look(self) -> None:
        """Complete the gradients for someone who looks at parameters and may read, edit or zero them.

        Not in the middle of a backward, and not while a unit computes: its weights are on the device.
        """
        if self._backward is None and all(is_on_host(host.master) for host in self._arrived.values()):
            self.complete()

    def complete(self) -> None:
        """Return when every gradient that has been produced is where the optimizer reads it."""
        self._leaving.settle()
        for host in self._arrived.values():
            host.master.grad = self._sums.so_far.pop(id(host))
        self._arrived.clear()

    def _forget(self) -> None:
        self._backward = None
        self._leaving.forget()
        self._leaving.settle()
        for key in self._arrived:
            self._sums.so_far.pop(key, None)
        self._arrived.clear()

    def zero(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget the gradients of separate masters, as `zero_grad` on a module does for shared ones."""
        self._bring_home()
        self.complete()
        for parameter in parameters:
            host, _ = self._watched.get(id(parameter), (None, None))
            if host is not None and not host.is_shared:
                host.master.grad = None

    def close(self) -> None:
        """Stop receiving and drop the gradients that live in our memory."""
        self._leaving.close()
        for host, hooks in self._watched.values():
            hooks.remove()
            grad = host.master.grad
            is_part = id(host) in self._aside or id(host) in self._arrived  # the rest of a backward that failed
            if grad is not None and (is_part or self._sums.is_ours(host, grad)):
                host.master.grad = grad = None
            if host.master.grad_dtype is None and (grad is None or grad.dtype is host.master.dtype):
                host.master.grad_dtype = host.master.dtype
        for state in (self._watched, self._units, self._aside, self._arrived, self._handed, self._sums.so_far):
            state.clear()


def _taken_from(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that a parameter has, dense; it has none then."""
    grad, parameter.grad = parameter.grad, None
    return None if grad is None else (grad if grad.layout is torch.strided else grad.to_dense()).detach()


def _ignore(_host: HostParameter) -> None:
    """Do nothing."""
