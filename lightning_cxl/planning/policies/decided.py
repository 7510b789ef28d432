"""`DecidedPolicy`: answers for every tensor what was decided for its role before the first one was placed."""

from collections.abc import Mapping

from lightning_cxl.placement.placement import Placement
from lightning_cxl.placement.policy import PlacementPolicy, PlacementRequest
from lightning_cxl.planning.policies.api import Decision


class DecidedPolicy:
    """A decision as a `PlacementPolicy`.

    Args:
        decision: of a `PlanningPolicy`.
        tiers: names of all tiers, nearest first; those without a share are where tensors may spill.
        rest: places what no decision was made for, and what a decorator or rule asks a tier for.
    """

    def __init__(self, decision: Decision, tiers: tuple[str, ...], rest: PlacementPolicy) -> None:
        self._decision = decision
        self._tiers = tiers
        self._rest = rest

    def place(self, request: PlacementRequest, free: Mapping[str, int]) -> Placement:
        """Return the split of the role, then the other tiers."""
        usual = self._rest.place(request, free)
        split = self._decision.splits.get(request.role)
        if split is None or request.tier is not None:
            return usual
        chosen = sorted((name for name in self._tiers if split.get(name, 0) > 0), key=lambda name: -split[name])
        others = [name for name in self._tiers if name not in chosen]
        others.sort(key=lambda name: free.get(name, request.nbytes) < request.nbytes)
        shares = tuple(split.get(name, 0.0) for name in (*chosen, *others)) if len(chosen) > 1 else ()
        return Placement((*chosen, *others), usual.pinned, self._decision.reasons.get(request.role, ""), shares)
