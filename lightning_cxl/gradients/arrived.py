"""`ArrivedGradients`: gradients that came from the device since gradients were complete, until somebody gets them.

They are completed (they become ``.grad`` of the masters), or handed over to an update that runs behind the backward
([Note: Overlapped updates]), or forgotten when the backward has failed.
"""

from collections.abc import Iterable

import torch

from lightning_cxl.gradients.leaving import Gradient, Group, LeavingGradients
from lightning_cxl.gradients.sums import GradientSums
from lightning_cxl.optim.masters import HostParameter, is_on_host


class ArrivedGradients:
    """Keeps account of gradients on their way from the device. See [Note: Life of a gradient].

    Args:
        leaving: sends them to the host.
        sums: has the sum of each parameter's gradients so far.
    """

    def __init__(self, leaving: LeavingGradients, sums: GradientSums) -> None:
        self._leaving = leaving
        self._sums = sums
        self._hosts: dict[int, HostParameter] = {}  # whose gradient came, or was taken away for it, by id
        self._handed: dict[int, list[Group]] = {}  # of gradients that someone else takes care of, by id of the host
        self._given: set[int] = set()  # ids of host parameters handed over in this step

    def __contains__(self, host: HostParameter) -> bool:
        """Whether the gradient of `host` is here, in part or as a whole, and not in ``.grad``."""
        return id(host) in self._hosts

    def take_away(self, host: HostParameter) -> bool:
        """Take the gradient so far out of ``.grad``, once; return whether that was done now."""
        if id(host) in self._hosts:
            return False  # of an earlier backward, or of another use of the parameter
        grad = host.master.grad
        if grad is None or grad.layout is not torch.strided or grad.requires_grad:
            return False
        self._sums.so_far[id(host)], host.master.grad = grad, None
        self._hosts[id(host)] = host
        return True

    def add(self, host: HostParameter, grad: torch.Tensor, key: int, unit: object, unit_size: int) -> None:
        """Let a gradient leave the device.

        Args:
            host: of the parameter.
            grad: strided, on the device; changed by nobody from now on.
            key: of stochastic rounding.
            unit: of the parameter; None for a parameter that belongs to none.
            unit_size: how many gradients leave together.
        """
        is_first = id(host) not in self._hosts
        self._hosts[id(host)] = host
        self._leaving.add(Gradient(host, grad, key, is_first), unit, unit_size)

    def leave(self) -> None:
        """Let gradients leave that still wait for other gradients of their unit."""
        self._leaving.leave()

    def step_is_over(self) -> None:
        """Learn that what was handed over has no more gradients to come in this step."""
        self._given.clear()

    def was_given(self, host: HostParameter) -> bool:
        """Return whether a gradient of `host` was handed over in this step."""
        return id(host) in self._given

    def hand_over(self, candidates: Iterable[HostParameter]) -> list[HostParameter]:
        """Return those of the candidates whose gradients have come from the device, as they came.

        The caller then gets each of these gradients with `take`; `complete` leaves them out.
        """
        own = {id(host) for host in candidates}
        hosts = [host for key, host in self._hosts.items() if key in own]
        own = {id(host) for host in hosts}
        groups = self._leaving.claim(own)
        for key in own:
            del self._hosts[key]
            self._handed[key] = [group for group in groups if key in group.hosts]
        self._given |= own
        return hosts

    def take(self, host: HostParameter) -> torch.Tensor:
        """Return a gradient that was handed over, on the worker: after it has been folded; raises its error."""
        for group in self._handed.pop(id(host)):
            group.fold.result()
        return self._sums.so_far.pop(id(host))

    def can_be_shown(self) -> bool:
        """Return whether every master is on the host, as torch takes a gradient beside its parameter only."""
        return all(is_on_host(host.master) for host in self._hosts.values())

    def complete(self) -> None:
        """Return when every gradient that has come is where the optimizer reads it."""
        self._leaving.settle()
        for host in self._hosts.values():
            host.master.grad = self._sums.so_far.pop(id(host))
        self._hosts.clear()

    def forget(self) -> None:
        """Drop the gradients that a failed backward has left here."""
        self._leaving.forget()
        self._leaving.settle()
        for key in self._hosts:
            self._sums.so_far.pop(key, None)
        self._hosts.clear()

    def close(self) -> None:
        """Let go of everything; nothing that still runs is waited for."""
        self._leaving.close()
        for state in (self._hosts, self._handed, self._sums.so_far):
            state.clear()
