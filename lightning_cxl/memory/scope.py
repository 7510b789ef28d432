"""Which host memory `lightning_cxl.empty` and `host_allocation` use: the innermost active one, else a default."""

import contextvars
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.stacks import HostMemory
from lightning_cxl.placement.placement import RoleHomePolicy
from lightning_cxl.placement.placer import Placer


@dataclass(frozen=True, eq=False, slots=True)
class Scope:
    """Host memory and who decides where in it a tensor goes."""

    memory: HostMemory
    placer: Placer
    pid: int
    """The process that made it. A forked child does not inherit the memory, so it does not use the scope."""


_REUSE_BELOW = 2**20  # outside of a run nobody makes the same tensors again and again, and nobody calls `trim`

# innermost last
_ACTIVE: contextvars.ContextVar[tuple[Scope, ...]] = contextvars.ContextVar("lightning_cxl_scopes", default=())


@contextmanager
def activate(memory: HostMemory, placer: Placer) -> Iterator[Scope]:
    """Make `memory` and `placer` the ones in use in this thread (context) until exit.

    Regions may be left in any order: each takes away only itself.
    """
    scope = Scope(memory, placer, os.getpid())
    _ACTIVE.set((*_ACTIVE.get(), scope))
    try:
        yield scope
    finally:
        _ACTIVE.set(tuple(other for other in _ACTIVE.get() if other is not scope))


def current() -> Scope:
    """Return the innermost active scope of this process, else its default: every tier, no budgets."""
    active = _active()
    return active[0] if active else _default(os.getpid())


def active() -> Scope | None:
    """Return the innermost active scope of this process, None outside of all."""
    return next(iter(_active()), None)


def holding(address: int) -> Scope:
    """Return the scope in use whose memory handed out the bytes at `address`, `current` when none did."""
    in_use = _active()
    if _default.cache_info().currsize:
        in_use.append(_default(os.getpid()))
    for scope in in_use:
        if scope.memory.tier_at(address) is not None:
            return scope
    return in_use[0] if in_use else current()


def _active() -> list[Scope]:
    pid = os.getpid()
    # a scope that was left in another thread is still among those of this one
    return [scope for scope in reversed(_ACTIVE.get()) if scope.pid == pid and not scope.memory.is_closed]


@functools.cache
def _default(pid: int) -> Scope:
    topology = Topology.detect()
    # pinned is what asks for it; the policy asks for nothing pinned
    memory = HostMemory(topology, pin=True, reuse_below=_REUSE_BELOW)
    return Scope(memory, Placer(topology, RoleHomePolicy(topology), memory.free_bytes), pid)
