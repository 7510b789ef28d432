"""Gradients on the host: each parameter's gradient lands in memory that the policy placed.

[Note: Life of a gradient]
A post-accumulate hook runs after autograd has added everything it had to add to ``compute.grad``: once per parameter
and backward, or once per use of a parameter whose data changed its device between uses ([Note: Which hooks stay]).
Every gradient that ever reaches a parameter passes here, so none is counted twice or lost, whatever the number of
micro-batches, backwards per step, or uses of a module.

* Shared parameter (compute is master): the first gradient of a step moves into host memory of ours, which becomes
  ``p.grad``; later ones are added to it: by autograd, in place, when it is float32 or wider, and by us when it has 16
  bits, since autograd would round every sum to nearest and lose small ones. For that a hook before the accumulation
  takes ``p.grad`` away, so that autograd delivers the new gradient alone. ``p.grad`` alone says whether a step is
  accumulating, so ``zero_grad``, ``p.grad = None`` and user code that edits gradients all keep their meaning.
* Separate master: the gradient is copied into host memory that becomes ``master.grad``, or added to it, and
  ``compute.grad`` is dropped. ``master.grad`` alone says whether a step is accumulating; it is None between the arrival
  of a gradient from a device and the end of that backward. A master whose ``requires_grad`` was turned off
  (Lightning's `toggle_optimizer`) takes no gradient.
* Streamed parameter (compute is master, but visits the device): autograd finds ``p.grad`` None, as the one so far is on
  the host, and delivers on the device. The gradient is copied to the host, the first of a step to where it stays,
  others to be added to the one so far, and becomes ``p.grad`` at the end of the backward, when the parameter is home;
  or it is handed over to an update that runs behind, and never becomes ``p.grad`` ([Note: Overlapped updates]).
* For `CPUAdam` a 16-bit gradient stays 16-bit: its kernel reads it as it is. What is added up becomes float32 at the
  second gradient, or stays bfloat16, stochastically rounded (``accumulate="bf16"``). Other optimizers get float32.
* Gradient memory belongs to ``.grad`` alone: nothing else keeps it, so whoever holds an old gradient keeps its values,
  and ``zero_grad`` gives the bytes back to the pool, whose pages stay warm for the next step.
* Copies from a device are started by the hook, and folded in order, measured where they landed or added: by the worker,
  if there is one, else by the hooks that follow. `finish`, which autograd itself calls at the end of that backward,
  waits for them: nobody reads a gradient too early.
* Gradients are numbered as they come, in the order of autograd, which does not depend on when copies are done: the
  random bits of a sum depend on that number.
"""

from collections.abc import Callable, Container, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.optim.formats import mix_key
from lightning_cxl.optim.grad_hooks import GradientHooks
from lightning_cxl.optim.masters import AllocateFor, HostParameter
from lightning_cxl.optim.meter import GradientMeter
from lightning_cxl.tiers.placement import TensorRole
from lightning_cxl.torch_private import at_end_of_backward
from lightning_cxl.transfer.engine import Transfer, TransferEngine

MAX_PENDING = 16
"""Copies in flight at most: bounds the staging memory, and is more than a copy engine needs to stay busy."""
_HALF = (torch.bfloat16, torch.float16)


class _Fold(Protocol):
    """A gradient on its way: done when it is where it stays."""

    def done(self) -> bool: ...
    def result(self) -> None: ...


class _OwnFold(NamedTuple):
    """Folded by whoever asks for the result."""

    transfer: Transfer
    fold: Callable[[], None]

    def done(self) -> bool:
        return self.transfer.done()

    def result(self) -> None:
        self.fold()


class GradientSink:
    """Receives the gradients of adopted parameters.

    Args:
        engine: starts copies from the device.
        allocate: gives host memory for a role.
        meter: copies, adds and measures.
        half_sums: whether bfloat16 gradients are added up in bfloat16 instead of float32.
        streamed: ids of the parameters whose weights visit the device; see [Note: Life of a gradient].
        worker: folds what comes from the device, one after the other; None leaves it to the thread of the backward.
        bring_home: lets all of them show their home; called when gradients have arrived.
    """

    def __init__(
        self,
        engine: TransferEngine,
        allocate: AllocateFor,
        meter: GradientMeter,
        *,
        half_sums: bool = False,
        streamed: Container[int] = frozenset(),
        bring_home: Callable[[], None] = lambda: None,
        worker: Executor | None = None,
    ) -> None:
        self._engine = engine
        self._allocate = allocate
        self._meter = meter
        self._half_sums = half_sums
        self._streamed = streamed
        self._bring_home = bring_home
        self._worker = worker
        self.num_received = 0
        """Gradients so far: makes every stochastic rounding another one."""
        self.reserves_streamed = True
        """Whether `watch` makes sure that there is room for the gradients of all streamed parameters at once."""
        self._watched: dict[int, tuple[HostParameter, GradientHooks]] = {}  # by id of the compute parameter
        # gradients so far, by id of the host parameter, while autograd delivers the next: state of one backward
        self._taken: dict[int, torch.Tensor] = {}
        # in this backward, by id of the host parameter: its gradient came from the device, or was taken away for it
        self._arrived: dict[int, HostParameter] = {}
        self._pending: dict[int, _Fold] = {}  # of these, not known to be done
        self._handed: dict[int, _Fold | None] = {}  # of gradients that someone else takes care of

    def watch(self, hosts: list[HostParameter]) -> None:
        """Receive the gradients of these parameters from now on (each is watched once).

        Raises:
            TierFullError: there is no room for their gradients; found out here, before any backward.
        """
        new = [host for host in hosts if id(host.compute) not in self._watched]
        reserved = [
            self._new_slot(host, host.grad_dtype)
            for host in new
            if host.compute.requires_grad and (self.reserves_streamed or id(host.compute) not in self._streamed)
        ]
        for host in new:
            half = host.master.dtype in _HALF or host.grad_dtype in _HALF
            if half:
                _allow_any_dtype(host.master)
            if self._visits_device(host):
                receive, before = partial(self._receive_streamed, host), partial(self._take_away, host)
                hooks = GradientHooks(host.compute, receive, before, stays=False)
            elif host.is_shared:  # hooks of the user find in `.grad` what autograd alone would have put there
                taking = partial(self._take_away, host) if half else None
                hooks = GradientHooks(host.compute, partial(self._receive_shared, host), taking, stays=True)
            else:
                hooks = GradientHooks(host.compute, partial(self._receive_separate, host), stays=False)
            self._watched[id(host.compute)] = (host, hooks)
        del reserved  # back to the pool, which keeps the pages for the first backward
        for host in new:
            host.grad_address = 0  # whoever gets these bytes next, it is not a gradient of ours

    def _visits_device(self, host: HostParameter) -> bool:
        return host.is_shared and id(host.compute) in self._streamed

    def _new_slot(self, host: HostParameter, dtype: torch.dtype) -> torch.Tensor:
        role = TensorRole.COMPUTE_GRADS if host.is_shared else TensorRole.MASTER_GRADS
        slot = self._allocate(host.compute, role, dtype)
        host.grad_address = slot.data_ptr()
        return slot

    def _take_away(self, host: HostParameter) -> None:
        """Keep the gradient so far from autograd's own addition; it comes back when the new one has been added."""
        if id(host) in self._arrived:
            return  # a part of it has come in this backward already, of another use of the parameter
        self._taken.pop(id(host), None)  # of a backward that failed: the user may have zeroed gradients since
        grad = host.master.grad
        if grad is not None and grad.layout is torch.strided and not grad.requires_grad:
            self._taken[id(host)], host.master.grad = grad, None
            if self._visits_device(host):
                self._arrived[id(host)] = host
                self._finish_at_the_end()  # also if nothing arrives, because `torch.autograd.grad` takes it

    def _receive_shared(self, host: HostParameter) -> None:
        grad, before, key = host.compute.grad, self._taken.pop(id(host), None), self._next_key()
        if grad is None or grad.layout is not torch.strided or grad.requires_grad:
            # nothing, sparse (the user's own optimizer understands it), or part of a graph (create_graph=True)
            if before is not None:
                with torch.enable_grad():
                    host.compute.grad = before if grad is None else before + grad
            return
        if before is not None:
            host.compute.grad = self._add(host, before, grad, key)
        elif grad.data_ptr() != host.grad_address:  # else autograd added it in place
            host.compute.grad = self._first(host, grad, grad.dtype)

    def _receive_separate(self, host: HostParameter) -> None:
        grad = host.compute.grad
        host.compute.grad = None
        if grad is None or not host.master.requires_grad:
            return
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        grad = grad.detach()
        if self._engine.computes_on_host:
            host.master.grad = self._folded(host, host.master.grad, grad, self._next_key())
        else:
            self._take_away(host)
            self._fetch(host, grad)

    def _receive_streamed(self, host: HostParameter) -> None:
        grad, host.compute.grad = host.compute.grad, None
        if grad is not None:
            if grad.device != self._engine.device:
                raise UnsupportedError(
                    f"`{host.name}` got a gradient on `{grad.device}`: it was used outside of its unit's forward, "
                    f"where it is on the host, and the unit computes on `{self._engine.device}`. Move that use, such "
                    "as a penalty on weights, into the unit's forward, use weight decay, or set `stream_weights=False`"
                )
            self._fetch(host, (grad if grad.layout is torch.strided else grad.to_dense()).detach())

    def _next_key(self) -> int:
        self.num_received += 1
        return mix_key(self.num_received)

    def _fetch(self, host: HostParameter, grad: torch.Tensor) -> None:
        self._finish_at_the_end()
        is_first = id(host) not in self._taken and id(host) not in self._arrived
        if is_first and self._visits_device(host) and grad.dtype is host.grad_dtype:
            destination = self._new_slot(host, grad.dtype)
        else:
            destination = self._allocate(host.compute, TensorRole.STAGING, grad.dtype)
        transfer = self._engine.d2h(grad, destination)
        fold = partial(self._fold_landed, transfer, host, destination, self._next_key())
        self._arrived[id(host)] = host
        if id(host) in self._pending:
            self._pending.pop(id(host)).result()
        self._pending[id(host)] = _OwnFold(transfer, fold) if self._worker is None else self._worker.submit(fold)
        while self._pending and (len(self._pending) > MAX_PENDING or next(iter(self._pending.values())).done()):
            self._settle_oldest()

    def _finish_at_the_end(self) -> None:
        """Let `loss.backward()` return with complete gradients, whoever called it; not where it fails."""
        at_end_of_backward(self.finish)

    def _settle_oldest(self) -> None:
        self._pending.pop(next(iter(self._pending))).result()

    @torch.no_grad()
    def _fold_landed(self, transfer: Transfer, host: HostParameter, landed: torch.Tensor, key: int) -> None:
        transfer.wait_host()
        self._taken[id(host)] = self._folded(host, self._taken.get(id(host)), landed, key)

    def _folded(self, host: HostParameter, before: torch.Tensor | None, grad: torch.Tensor, key: int) -> torch.Tensor:
        """Return the gradient so far: the first of a step is kept, others are added."""
        if before is not None:
            return self._add(host, before, grad, key)
        if grad.data_ptr() != host.grad_address:
            return self._first(host, grad, host.grad_dtype)
        self._meter.sums([grad])
        return grad

    def _first(self, host: HostParameter, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        slot = self._new_slot(host, dtype)
        self._meter.copy(grad, slot)
        return slot

    def _add(self, host: HostParameter, accumulator: torch.Tensor, grad: torch.Tensor, key: int) -> torch.Tensor:
        """Add `grad` in place, or in wider memory if need be; returns the sum."""
        keeps_half = self._half_sums and accumulator.dtype is torch.bfloat16
        if accumulator.dtype in _HALF and not keeps_half:
            accumulator = self._first(host, accumulator, torch.float32)
        self._meter.accumulate(grad, accumulator, key)
        return accumulator

    def hand_over(self, candidates: Iterable[HostParameter]) -> list[HostParameter]:
        """Return those of the candidates whose gradients have come from the device in this backward, as they came.

        Who calls this takes care of these gradients, with `take`; `finish` no longer does.
        """
        own = {id(host) for host in candidates}
        hosts = [host for key, host in self._arrived.items() if key in own]
        for host in hosts:
            del self._arrived[id(host)]
            self._handed[id(host)] = self._pending.pop(id(host), None)
        return hosts

    def take(self, host: HostParameter) -> torch.Tensor:
        """Return a gradient that was handed over, on the worker: after it has been folded; raises its error."""
        fold = self._handed.pop(id(host))
        if fold is not None:
            fold.result()
        return self._taken.pop(id(host))

    def start_backward(self) -> None:
        """Forget what a backward that failed left behind."""
        self._bring_home()
        self._settle()
        self._forget()

    def finish(self) -> None:
        """Return when every gradient that has been produced is where the optimizer reads it."""
        self._bring_home()
        self._settle()
        for host in self._arrived.values():
            host.master.grad = self._taken.pop(id(host))
        self._arrived.clear()

    @torch.no_grad()
    def _settle(self) -> None:
        while self._pending:
            self._settle_oldest()

    def _forget(self) -> None:
        for key in [key for key in self._taken if key not in self._handed]:
            self._taken.pop(key, None)
        self._arrived.clear()

    def zero(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget the gradients of separate masters, as `zero_grad` on a module does for shared ones."""
        self.finish()
        self._forget()
        for parameter in parameters:
            host, _ = self._watched.get(id(parameter), (None, None))
            if host is not None and not host.is_shared:
                host.master.grad = None

    def close(self) -> None:
        """Stop receiving and drop the gradients that live in our memory."""
        self._pending.clear()
        self._arrived.clear()
        self._handed.clear()
        for host, hooks in self._watched.values():
            hooks.remove()
            grad = host.master.grad
            ours = grad is not None and grad.layout is torch.strided and grad.data_ptr() == host.grad_address
            if ours or id(host) in self._taken:  # the rest of a backward that failed is a part of a gradient
                host.master.grad = grad = None
            if host.master.grad_dtype is None and (grad is None or grad.dtype is host.master.dtype):
                host.master.grad_dtype = host.master.dtype
        self._watched.clear()
        self._taken.clear()


def _allow_any_dtype(parameter: Any) -> None:
    parameter.grad_dtype = None
