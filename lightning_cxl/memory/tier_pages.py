"""One tier as stacks use it: where its pages come from, its one budget, and what it still has free."""

import time
from typing import Protocol

from lightning_cxl.machine.topology import Tier, Topology
from lightning_cxl.memory.adaptors import Budget, BudgetResource
from lightning_cxl.memory.numa import NumaResource, PageSource
from lightning_cxl.memory.striped import StripedResource

_FREE_MAX_AGE_S = 0.5  # reading /proc for every placement would cost more than the allocation


class MakeLeaf(Protocol):
    """Makes the leaf of a tier."""

    def __call__(self, tier: Tier, *, inherit: bool = False) -> PageSource:
        """Return a leaf whose memory forked children inherit or not."""


class TierPages:
    """Gives sources of a tier's pages, which all charge its one budget.

    Args:
        tier: the tier.
        leaf: makes the `NumaResource` or `StripedResource` of the tier, whose memory forked children inherit or not.
        budget_bytes: most bytes held from the OS by all stacks together.
    """

    def __init__(self, tier: Tier, leaf: MakeLeaf, budget_bytes: int) -> None:
        self.tier = tier
        self.budget = Budget(tier.name, budget_bytes)
        self._leaves = {inherit: leaf(tier, inherit=inherit) for inherit in (False, True)}
        self._os_free = (float("-inf"), 0)  # when, bytes
        self._held_then = 0

    def source(self, *, inherit: bool, node_fraction: float = 1.0) -> BudgetResource:
        """Return a source of pages; see `BudgetResource` for `node_fraction`."""
        return BudgetResource(self._leaves[inherit], self.budget, node_fraction)

    def free_bytes(self, used_bytes: int, held_by_neighbours: int) -> int:
        """Return what could still be allocated: the budget's rest or the nodes', and what stacks keep unused.

        Args:
            used_bytes: the part of what is held that living buffers use.
            held_by_neighbours: bytes held by all tiers on the same nodes, this one included. The OS is asked twice a
                second at most; in between, growth of this number is subtracted from its last answer.
        """
        now = time.monotonic()
        if now - self._os_free[0] > _FREE_MAX_AGE_S:
            self._os_free = (now, self._leaves[False].free_bytes())
            self._held_then = held_by_neighbours
        os_free = self._os_free[1] - (held_by_neighbours - self._held_then)
        held = self.budget.held_bytes
        return max(0, min(self.budget.limit_bytes - held, os_free)) + held - used_bytes


def make_leaf(tier: Tier, topology: Topology, stripe_bytes: int, *, inherit: bool = False) -> PageSource:
    """Return the leaf of a tier: its node, or its nodes striped by their rated bandwidth (evenly when unknown).

    Of a tier that fills its nearest nodes first, nodes at equal distance are striped.
    """
    leaves = [NumaResource(tier.name, node.node_id, topology, inherit=inherit) for node in tier.nodes]
    if len(leaves) == 1:
        return leaves[0]
    speeds = [node.read_bytes_per_s for node in tier.nodes]
    weights = [speed or 1.0 for speed in speeds] if all(speeds) else [1.0] * len(leaves)
    turns = [node.distance if tier.nearest_first else 0 for node in tier.nodes]
    return StripedResource(list(zip(leaves, weights, strict=True)), stripe_bytes, turns=turns)
