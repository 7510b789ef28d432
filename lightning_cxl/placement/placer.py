"""`Placer`: asks the policy on behalf of the allocator hook, the runtime and the user, with what is free right now."""

from collections.abc import Callable, Mapping

from lightning_cxl.machine.topology import Topology
from lightning_cxl.placement.decorators import TierSpec
from lightning_cxl.placement.placement import Placement, TensorRole
from lightning_cxl.placement.policy import PlacementPolicy, PlacementRequest


class Placer:
    """A policy together with the machine it decides about.

    Args:
        topology: the tiers there are.
        policy: decides.
        free: returns the bytes that can still be allocated, by tier name.
        owner: returns what the module of a parameter (or of its gradient) asks for, None when no module owns it.
    """

    def __init__(
        self,
        topology: Topology,
        policy: PlacementPolicy,
        free: Callable[[], Mapping[str, int]],
        owner: Callable[[object], TierSpec | None] | None = None,
    ) -> None:
        self.topology = topology
        self.policy = policy
        self._free = free
        self._owner = owner

    def with_policy(self, policy: PlacementPolicy) -> "Placer":
        """Return a placer for the same machine and owners that asks another policy."""
        return Placer(self.topology, policy, self._free, self._owner)

    def owner(self, tensor: object) -> TierSpec | None:
        """Return what the module that a parameter or gradient belongs to asks for; None when no module owns it."""
        return None if self._owner is None else self._owner(tensor)

    def place(
        self,
        role: TensorRole,
        nbytes: int,
        *,
        tier: str | None = None,
        spec: TierSpec | None = None,
        module: str = "",
        source: str = "",
    ) -> Placement:
        """Return the placement of one tensor.

        Args:
            role: what the tensor is for.
            nbytes: its size.
            tier: a tier asked for explicitly; beats `spec`.
            spec: what a decorated module asks for.
            module: name of the module that owns the tensor, for messages.
            source: who asked for the tier, for messages.

        Raises:
            TierNotFoundError: the tier asked for, or one the policy names, does not exist; the message says which do.
        """
        if tier is None and spec is not None:
            tier = spec.for_role(role)
            source = source or f"tier({spec})"
        if tier is not None:
            self.topology.tier(tier)
        request = PlacementRequest(role, nbytes, module, tier, source if tier is not None else "")
        placement = self.policy.place(request, self._free())
        for name in placement.tiers:
            self.topology.tier(name)
        return placement
