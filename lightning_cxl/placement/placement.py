"""The role of a tensor (`TensorRole`), its `Placement`, and policies that are asked tensor by tensor."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lightning_cxl.machine.topology import TierKind, Topology
from lightning_cxl.units import format_bytes


class TensorRole(enum.Enum):
    """The purpose of a host tensor; the memory classes of arXiv 2507.03305, section on allocation."""

    COMPUTE_WEIGHTS = "compute_weights"
    COMPUTE_GRADS = "compute_grads"
    MASTER_WEIGHTS = "master_weights"
    MASTER_GRADS = "master_grads"
    MOMENTUM = "momentum"
    VARIANCE = "variance"
    ACTIVATIONS = "activations"
    STAGING = "staging"

    @property
    def is_copied(self) -> bool:
        """Whether a device with memory of its own copies it; masters and moments are for the CPU alone."""
        return self not in (TensorRole.MASTER_WEIGHTS, TensorRole.MOMENTUM, TensorRole.VARIANCE)


@dataclass(frozen=True, slots=True)
class Placement:
    """The tiers that one tensor may use, in order of preference."""

    tiers: tuple[str, ...]
    """Tier names, first choice first; the others are where it may spill."""
    pinned: bool = False
    """Page-locked and registered with the device's driver. A policy may leave it: what a device copies of a model is
    page-locked anyway (`is_copied`), and with ``pin_memory=False``, or without such a device, nothing is."""
    reason: str = ""
    """Why, in a few words: shown by the report."""
    shares: tuple[float, ...] = ()
    """Fraction of the bytes on each of `tiers`, in stripes; the tensor may spill to those with 0. Empty:
    everything goes to the first."""

    def __post_init__(self) -> None:
        """Refuse a placement that names no tier, or whose shares are not fractions of one whole."""
        if not self.tiers:
            raise ValueError("a Placement must name at least one tier")
        if self.shares:
            fits = len(self.shares) == len(self.tiers) and min(self.shares) >= 0
            if not fits or not math.isclose(sum(self.shares), 1, abs_tol=1e-6):
                raise ValueError(
                    f"shares must be one fraction per tier, not negative and 1 together, "
                    f"got {self.shares} for {self.tiers}"
                )

    def split(self) -> dict[str, float]:
        """Return the tiers that get bytes, with their fractions; they add up to 1."""
        if not self.shares:
            return {self.tiers[0]: 1.0}
        return {tier: share for tier, share in zip(self.tiers, self.shares, strict=True) if share > 0}

    def describe(self) -> str:
        """Return e.g. ``"cxl, else dram, pinned (decorator on LlamaDecoderLayer)"`` or ``"dram 80 %, cxl 20 %"``."""
        split = self.split()
        parts = [f"{tier} {share:.0%}".replace("%", " %") for tier, share in split.items()]
        text = ", ".join(parts) if len(split) > 1 else next(iter(split))
        text += "".join(f", else {tier}" for tier in self.tiers if tier not in split)
        text += ", pinned" if self.pinned else ""
        return f"{text} ({self.reason})" if self.reason else text


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
    """Source of the request for `tier`, e.g. ``"rule 'model.layers.*'"``."""


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
