"""The canonical stacks of one tier, built in this one place: what lies over what, and over which budget."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from lightning_cxl._numa import page_nodes
from lightning_cxl.memory.adaptors import Budget, BudgetResource
from lightning_cxl.memory.arena import ArenaResource
from lightning_cxl.memory.numa import NumaResource, PageSource
from lightning_cxl.memory.pinned import PinnedResource
from lightning_cxl.memory.pool import PoolResource
from lightning_cxl.memory.resource import MemoryResource
from lightning_cxl.memory.striped import StripedResource, stripe_bytes_for
from lightning_cxl.tiers.placement import TensorRole
from lightning_cxl.tiers.topology import Tier, Topology

_FREE_MAX_AGE_S = 0.5  # reading /proc for every placement would cost more than the allocation

Pinner = Callable[[MemoryResource], MemoryResource]
"""Puts page-locking on a resource."""


class Leaf(PageSource, MemoryResource, Protocol):
    """What a stack stands on: allocates buffers of its own and backs parts of an arena's range."""


class MakeLeaf(Protocol):
    """Makes the leaf of a tier."""

    def __call__(self, tier: Tier, *, inherit: bool = False) -> Leaf:
        """Return a leaf whose memory forked children inherit or not."""


_KINDS = {
    TensorRole.ACTIVATIONS: "activations",
    TensorRole.COMPUTE_WEIGHTS: "inherited",
    TensorRole.STAGING: "inherited",
}


class TierStacks:
    """Serves one tier: up to four stacks, built when first asked for, over one budget.

    ==========  ===================================  ==========================================================
    inherited   ``Pool(Budget(leaf))``               pageable weights and staging; forked children see them
    pageable    ``Pool(Budget(leaf))``               masters, moments and gradients of the CPU
    pinned      ``Pool(Pinned(Budget(leaf)))``       what a device copies from or to
    activations ``Arena(leaf)`` charging the budget  pageable activations; pinned ones come from the pinned pool,
                                                     because a copy must not cross two registrations
    ==========  ===================================  ==========================================================

    Args:
        tier: the tier.
        leaf: makes the `NumaResource` or `StripedResource` of the tier, whose memory forked children inherit or not.
        budget_bytes: most bytes held from the OS by all stacks together.
        pinner: how memory is page-locked.
    """

    def __init__(self, tier: Tier, leaf: MakeLeaf, budget_bytes: int, pinner: Pinner) -> None:
        self.tier = tier
        self.budget = Budget(tier.name, budget_bytes)
        self._leaf = leaf(tier)
        self._inherited_leaf = leaf(tier, inherit=True)
        self._pinner = pinner
        self._stacks: dict[str, PoolResource | ArenaResource] = {}
        self._lock = threading.Lock()
        self._os_free = (float("-inf"), 0)  # when, bytes
        self._held_then = 0

    def stack(self, role: TensorRole, pinned: bool) -> PoolResource | ArenaResource:
        """Return the stack that serves a role."""
        kind = "pinned" if pinned else _KINDS.get(role, "pageable")
        with self._lock:
            if kind not in self._stacks:
                self._stacks[kind] = self._build(kind)
            return self._stacks[kind]

    def held_bytes(self) -> int:
        """Return the bytes held from the OS."""
        return self.budget.held_bytes

    def free_bytes(self, held_by_neighbours: int) -> int:
        """Return what could still be allocated: the budget's rest or the nodes', and what the stacks keep unused.

        Args:
            held_by_neighbours: bytes held by all tiers on the same nodes, this one included. The OS is asked twice a
                second at most; in between, growth of this number is subtracted from its last answer.
        """
        used, held = self._usage()
        now = time.monotonic()
        if now - self._os_free[0] > _FREE_MAX_AGE_S:
            self._os_free = (now, self._leaf.free_bytes())
            self._held_then = held_by_neighbours
        os_free = self._os_free[1] - (held_by_neighbours - self._held_then)
        return max(0, min(self.budget.limit_bytes - self.budget.held_bytes, os_free)) + held - used

    def trim(self) -> None:
        """Give everything unused back to the OS."""
        for stack in self._all():
            stack.trim()

    def end_step(self) -> None:
        """Tell the arena, if there is one, that a training step is over."""
        for stack in self._all():
            if isinstance(stack, ArenaResource):
                stack.end_step()

    def close(self) -> None:
        """Give everything back as soon as its last user is gone."""
        for stack in self._all():
            stack.close()

    def _all(self) -> list[PoolResource | ArenaResource]:
        with self._lock:
            return list(self._stacks.values())

    def _usage(self) -> tuple[int, int]:
        usages = [stack.usage() for stack in self._all()]
        return sum(used for used, _ in usages), sum(held for _, held in usages)

    def _build(self, kind: str) -> PoolResource | ArenaResource:
        if kind == "activations":
            return ArenaResource(self._leaf, self.budget, max(1, self.budget.limit_bytes))
        leaf = self._inherited_leaf if kind == "inherited" else self._leaf
        budgeted = BudgetResource(leaf, self.budget)
        return PoolResource(self._pinner(budgeted) if kind == "pinned" else budgeted)


def make_leaf(tier: Tier, topology: Topology, *, inherit: bool = False) -> Leaf:
    """Return the leaf of a tier: its node, or its nodes striped by their rated bandwidth (evenly when unknown)."""
    leaves = [NumaResource(tier.name, node.node_id, topology, inherit=inherit) for node in tier.nodes]
    if len(leaves) == 1:
        return leaves[0]
    speeds = [node.read_bytes_per_s for node in tier.nodes]
    weights = [speed or 1.0 for speed in speeds] if all(speeds) else [1.0] * len(leaves)
    return StripedResource(list(zip(leaves, weights, strict=True)), stripe_bytes_for(tier.capacity_bytes))


def make_pinner(topology: Topology, *, required: bool = False) -> Pinner:
    """Return what page-locks memory on this machine; pages can move only where there are several nodes."""
    several = len({node for tier in topology.tiers for node in tier.node_ids}) > 1
    return lambda upstream: PinnedResource(upstream, required=required, where=page_nodes if several else None)
