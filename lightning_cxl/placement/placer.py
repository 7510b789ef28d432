"""`Placer`: answers where a tensor goes, for the allocator hook, the run and the user."""

from collections.abc import Callable, Mapping

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.machine.topology import TierKind, Topology
from lightning_cxl.placement.decorators import TierSpec, check_role_on_ssd
from lightning_cxl.placement.placement import Placement, PlacementPolicy, PlacementRequest, TensorRole


class _Free(dict[str, int]):
    """Bytes by tier name. Reading a tier that this machine does not have asks for it, see `Topology.tier`."""

    def __init__(self, topology: Topology, free: Callable[[], Mapping[str, int]]) -> None:
        super().__init__(free())
        self._topology = topology
        self._read = free

    def __missing__(self, name: str) -> int:
        self._topology.tier(name)
        self.update(self._read())
        return self.get(name, 0)


class Placer:
    """A policy together with the machine that it decides about.

    Args:
        free: returns the bytes that can still be allocated, by tier name.
    """

    def __init__(self, topology: Topology, policy: PlacementPolicy, free: Callable[[], Mapping[str, int]]) -> None:
        self.topology = topology
        self.policy = policy
        self._free = free

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
        if tier is None and spec is not None:
            tier = spec.for_role(role)
            source = source or f"tier({spec})"
            if tier is not None and self._is_ssd(tier) and role is TensorRole.COMPUTE_WEIGHTS:
                tier = None  # they move there when their run begins
        if tier is not None and self._is_ssd(tier):
            check_role_on_ssd(role, source or "the request")
            return Placement((tier,), reason=source or "asked for explicitly")  # no policy is asked: nothing spills
        request = PlacementRequest(role, nbytes, module, tier, source if tier is not None else "")
        placement = self.policy.place(request, _Free(self.topology, self._free))
        for name in placement.tiers:
            if self._is_ssd(name):
                raise UnsupportedError(
                    f"policy {type(self.policy).__name__} places {role.value} on tier {name!r}, and policies place in "
                    f"memory ({', '.join(self.topology.names)}). Ask for it by a rule or decorator for optimizer_state"
                )
        return placement

    def _is_ssd(self, tier: str) -> bool:
        return self.topology.tier(tier).kind is TierKind.SSD
