"""Gradients on the host: each parameter's gradient lands in memory that the policy placed.

[Note: Life of a gradient]
A post-accumulate hook runs once per parameter and backward graph, after autograd has added everything it had to add to
``compute.grad``. Every gradient that ever reaches a parameter passes here, so none is counted twice or lost, whatever
the number of micro-batches, backwards per step, or uses of a module.

* Shared parameter (compute is master): the first gradient of a step moves into host memory of ours, which becomes
  ``p.grad``; later ones are added to it by autograd, in place. ``p.grad`` alone says whether a step is accumulating, so
  ``zero_grad``, ``p.grad = None`` and user code that edits gradients all keep their meaning.
* Separate master: the gradient is copied into host memory that becomes ``master.grad``, or added to it, and
  ``compute.grad`` is dropped. ``master.grad`` alone says whether a step is accumulating. A master whose
  ``requires_grad`` was turned off (Lightning's `toggle_optimizer`) takes no gradient.
* Gradient memory belongs to ``.grad`` alone: nothing else keeps it, so whoever holds an old gradient keeps its values,
  and ``zero_grad`` gives the bytes back to the pool, whose pages stay warm for the next step.
* Copies from a device are started by the hook and folded in order, at the latest in `finish`, which autograd itself
  calls at the end of that backward: nobody reads a gradient too early.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from lightning_cxl.optim.masters import AllocateFor, HostParameter
from lightning_cxl.tiers.placement import TensorRole
from lightning_cxl.transfer.engine import Transfer, TransferEngine

_MAX_PENDING = 16
"""Copies in flight at most: bounds the staging memory, and is more than a copy engine needs to stay busy."""


class GradientSink:
    """Receives the gradients of adopted parameters.

    Args:
        engine: starts copies from the device.
        allocate: gives host memory for a role.
    """

    def __init__(self, engine: TransferEngine, allocate: AllocateFor) -> None:
        self._engine = engine
        self._allocate = allocate
        self._watched: dict[int, tuple[HostParameter, RemovableHandle]] = {}  # by id of the compute parameter
        self._pending: deque[tuple[Transfer, torch.Tensor, HostParameter]] = deque()

    def watch(self, hosts: list[HostParameter]) -> None:
        """Receive the gradients of these parameters from now on (each is watched once).

        Raises:
            TierFullError: there is no room for their gradients; found out here, before any backward.
        """
        new = [host for host in hosts if id(host.compute) not in self._watched]
        reserved = [self._new_slot(host) for host in new if host.compute.requires_grad]
        for host in new:
            receive = self._receive_shared if host.is_shared else self._receive_separate
            self._watched[id(host.compute)] = (host, _on_gradient(host, receive))
        del reserved  # back to the pool, which keeps the pages for the first backward

    def _new_slot(self, host: HostParameter) -> torch.Tensor:
        role = TensorRole.COMPUTE_GRADS if host.is_shared else TensorRole.MASTER_GRADS
        slot = self._allocate(host.compute, role, host.master.dtype)
        host.grad_address = slot.data_ptr()
        return slot

    def _receive_shared(self, host: HostParameter) -> None:
        grad = host.compute.grad
        if grad is None or grad.layout is not torch.strided or grad.requires_grad:
            return  # nothing, sparse (the user's own optimizer understands it), or part of a graph (create_graph=True)
        if grad.data_ptr() == host.grad_address:
            return  # autograd added it in place
        slot = self._new_slot(host)
        slot.copy_(grad)
        host.compute.grad = slot

    def _receive_separate(self, host: HostParameter) -> None:
        grad = host.compute.grad
        host.compute.grad = None
        if grad is None or not host.master.requires_grad:
            return
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        grad = grad.detach()
        if self._engine.computes_on_host:
            self._fold(host, grad)
            return
        if not self._pending:
            # so that `loss.backward()` returns with complete gradients, whoever called it
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        staging = self._allocate(host.compute, TensorRole.STAGING, grad.dtype)
        self._pending.append((self._engine.d2h(grad, staging), staging, host))
        while self._pending and (self._pending[0][0].done() or len(self._pending) > _MAX_PENDING):
            self._fold_oldest()

    def _fold_oldest(self) -> None:
        transfer, staging, host = self._pending.popleft()
        transfer.wait_host()
        self._fold(host, staging)

    def _fold(self, host: HostParameter, grad: torch.Tensor) -> None:
        """Copy the first gradient of a step, add the others."""
        if host.master.grad is None:
            slot = self._new_slot(host)
            slot.copy_(grad)
            host.master.grad = slot
        else:
            host.master.grad.add_(grad)

    def finish(self) -> None:
        """Return when every gradient that has been produced is where the optimizer reads it."""
        with torch.no_grad():
            while self._pending:
                self._fold_oldest()

    def zero(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget the gradients of separate masters, as `zero_grad` on a module does for shared ones."""
        self.finish()
        for parameter in parameters:
            host, _ = self._watched.get(id(parameter), (None, None))
            if host is not None and not host.is_shared:
                host.master.grad = None

    def close(self) -> None:
        """Stop receiving and drop the gradients that live in our memory."""
        self._pending.clear()
        for host, handle in self._watched.values():
            handle.remove()
            grad = host.master.grad
            ours = grad is not None and grad.layout is torch.strided and grad.data_ptr() == host.grad_address
            if ours:
                host.master.grad = None
        self._watched.clear()


def _on_gradient(host: HostParameter, receive: Callable[[HostParameter], None]) -> RemovableHandle:
    """Call `receive(host)` whenever autograd has finished accumulating into the compute parameter."""
    was_trainable = host.compute.requires_grad
    host.compute.requires_grad_(True)  # autograd accepts hooks on trainable tensors only
    hook = partial(_receive, host, receive)
    handle: RemovableHandle = host.compute.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    host.compute.requires_grad_(was_trainable)
    return handle


def _receive(host: HostParameter, receive: Callable[[HostParameter], None], _parameter: torch.Tensor) -> None:
    with torch.no_grad():
        receive(host)
