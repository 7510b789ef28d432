"""Which tier a tensor goes to: the `PlacementPolicy` protocol and the default, `RoleHomePolicy`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lightning_cxl.machine.topology import TierKind, Topology
from lightning_cxl.placement.placement import Placement, TensorRole
from lightning_cxl.units import format_bytes

# The CPU streams optimizer state every step. A GPU's writes into CXL lose 33 % and its reads 4 % (arXiv 2507.03305);
# activations move once each way.
_DRAM_FIRST = (TierKind.DRAM, TierKind.CXL)
_CXL_FIRST = (TierKind.CXL, TierKind.DRAM)
_HOMES: Mapping[TensorRole, tuple[TierKind, ...]] = {
    TensorRole.COMPUTE_WEIGHTS: _CXL_FIRST,
    TensorRole.COMPUTE_GRADS: _DRAM_FIRST,
    TensorRole.MASTER_WEIGHTS: _DRAM_FIRST,
    TensorRole.MASTER_GRADS: _DRAM_FIRST,
    TensorRole.MOMENTUM: _DRAM_FIRST,
    TensorRole.VARIANCE: _DRAM_FIRST,
    TensorRole.ACTIVATIONS: _CXL_FIRST,
    TensorRole.STAGING: _DRAM_FIRST,
}


def home_kinds(role: TensorRole, *, cpu_computes: bool) -> tuple[TierKind, ...]:
    """Return the kinds of memory that a role belongs on, its home first.

    Args:
        role: of a tensor.
        cpu_computes: the CPU is the accelerator, so it reads the weights all the time: they are at home in DRAM then.
    """
    return _DRAM_FIRST if cpu_computes and role is TensorRole.COMPUTE_WEIGHTS else _HOMES[role]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """One tensor, or several that stay together, looking for a home."""

    role: TensorRole
    nbytes: int
    module: str = ""
    """Name of the module that owns it, for messages; empty when none does."""
    tier: str | None = None
    """A tier asked for explicitly; None leaves it to the policy."""
    source: str = ""
    """Who asked for `tier`, e.g. ``"rule 'model.layers.*'"``."""


class PlacementPolicy(Protocol):
    """Decides where tensors go. Must not keep state: the same request and free bytes give the same placement."""

    def place(self, request: PlacementRequest, free: Mapping[str, int]) -> Placement:
        """Return the tiers to try in order.

        The first is where the tensor belongs; that another one is used is a spill, reported by the allocator.

        Args:
            request: what is to be placed.
            free: bytes that can still be allocated, by tier name. Without CXL memory ``cxl`` is not among the keys;
                who reads ``free["cxl"]`` all the same asks for that tier, see `Topology`.
        """


class RoleHomePolicy:
    """Every role has a home kind of memory; what does not fit there may spill to the other tiers.

    An explicit tier goes first instead. The first choice stays first even when it is full, so that the allocator sees
    the spill and warns or refuses; among the tiers to spill to, those that hold the request come first.

    Args:
        topology: the tiers there are.
        cpu_computes: see `home_kinds`.
    """

    def __init__(self, topology: Topology, *, cpu_computes: bool = False) -> None:
        self._topology = topology
        self._cpu_computes = cpu_computes

    def place(self, request: PlacementRequest, free: Mapping[str, int]) -> Placement:
        """Return the explicit tier or the role's home, then the others.

        Raises:
            TierNotFoundError: `request.tier` names none of the topology.
        """
        if request.tier is not None:
            first = self._topology.tier(request.tier).name
            others = [name for name in self._topology.names if name != first]
            reason = request.source or "asked for explicitly"
        else:
            first, *others = self._by_kind(home_kinds(request.role, cpu_computes=self._cpu_computes))
            reason = f"home of {request.role.value}"
        if free.get(first, request.nbytes) < request.nbytes:
            reason += f"; {first} has {format_bytes(free[first])} free of {format_bytes(request.nbytes)} needed"
        others.sort(key=lambda name: free.get(name, request.nbytes) < request.nbytes)
        return Placement((first, *others), reason=reason)

    def _by_kind(self, kinds: tuple[TierKind, ...]) -> list[str]:
        """Return all tier names, those of the given kinds first and in that order."""
        names = [tier.name for kind in kinds for tier in self._topology.select(kind=kind)]
        return names + [name for name in self._topology.names if name not in names]
