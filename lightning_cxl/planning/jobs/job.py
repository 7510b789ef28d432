"""What one training job keeps in host memory, and what a step moves of it: the input of policies and predictions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_cxl.inventory.workload import Overlap
from lightning_cxl.placement.placement import TensorRole

Phase = Literal["forward", "backward", "update"]
"""Backward includes the recompute of units; update is the optimizer's step on the host."""


class Move(NamedTuple):
    """Bytes of a memory class that one optimizer step moves."""

    phase: Phase
    kind: Literal["h2d", "d2h", "cpu"]
    """A copy to the device, a copy from it, or bytes that the CPUs read and write."""
    nbytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryClass:
    """The tensors of one role that are placed alike."""

    role: TensorRole
    nbytes: int
    tier: str | None = None
    """Where a decorator or rule wants all of it; None leaves it to the policy. A job has at most one such class per
    role and tier, and one per role without a tier."""
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training job, all of its micro-batches of one optimizer step together."""

    name: str
    classes: tuple[MemoryClass, ...]
    num_parameters: int = 0
    num_units: int = 1
    """Blocks that come and go one after the other."""
    num_tokens: int = 0
    """Of one optimizer step."""
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    """With the recompute of units."""
    overlap: Overlap = "none"
    device_bytes: int | None = None
    """Peak on the device; None where it is not known."""

    def free_classes(self) -> dict[TensorRole, MemoryClass]:
        """Return the classes that the policy decides about, by role."""
        return {each.role: each for each in self.classes if each.tier is None}

    def in_one_order(self) -> list[MemoryClass]:
        """Return the classes by role and tier: what is added up in this order does not depend on who listed them."""
        return sorted(self.classes, key=lambda each: (each.role.name, each.tier or ""))

    def bytes_of(self) -> Mapping[TensorRole, int]:
        """Return the bytes of every role."""
        total: dict[TensorRole, int] = {}
        for each in self.classes:
            total[each.role] = total.get(each.role, 0) + each.nbytes
        return total
