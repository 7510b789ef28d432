"""What one training job keeps in host memory, and what a step moves of it: the input of policies and predictions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from lightning_cxl.inventory.workload import Overlap
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.ssd_options import SSD

SSD_MOVES = ("ssd_read", "ssd_write")
Phase = Literal["forward", "backward", "update"]
"""Backward includes the recompute of units; update is the optimizer's step on the host."""


class Move(NamedTuple):
    """Bytes of a memory class that one optimizer step moves."""

    phase: Phase
    kind: Literal["h2d", "d2h", "cpu", "ssd_read", "ssd_write"]
    """A copy to the device, a copy from it, bytes that the CPUs read and write, or a transfer from or to drives."""
    nbytes: float


class Exchange(NamedTuple):
    """Bytes that the ranks of a run exchange in one phase of one optimizer step."""

    phase: Phase
    kind: Literal["gather", "reduce"]
    """Before the device computes with it, or after it has computed it."""
    peer_bytes: float
    """That each device receives from devices of its machine, and sends to them."""
    network_bytes: float
    """That each machine receives from others, and sends."""
    hops: float
    """Steps of rings, one after the other: each takes the latency of its links."""


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
    num_records: int = 0
    """Of state and weights on the tier `ssd`."""
    num_visits: int = 0
    """Of these records to memory in one update, one after the other: what belongs to one unit comes together."""
    num_tokens: int = 0
    """Of one optimizer step."""
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    """With the recompute of units."""
    overlap: Overlap = "none"
    device_bytes: int | None = None
    """Peak on the device; None where it is not known."""
    exchanges: tuple[Exchange, ...] = ()
    """What several ranks exchange; all other bytes of the job are those of one machine."""
    shares_weights: bool = False
    """All devices of the machine read the same compute weights, wherever these lie."""

    @property
    def ssd_bytes(self) -> int:
        """Bytes on the tier `ssd`, one version of them."""
        return self.ssd_bytes_in(1)

    def ssd_bytes_in(self, versions: int) -> int:
        """Return the bytes on the tier `ssd` where state lies there in several versions; all else has one."""
        others = (TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS)
        on_ssd = [each for each in self.classes if each.tier == SSD]
        return sum(each.nbytes * (1 if each.role in others else versions) for each in on_ssd)

    @property
    def ssd_written_bytes(self) -> float:
        """Bytes that a step writes to the tier `ssd`."""
        return sum(move.nbytes for each in self.classes for move in each.moves if move.kind == "ssd_write")

    @property
    def ssd_read_bytes(self) -> float:
        """Bytes that a step reads from the tier `ssd`."""
        return sum(move.nbytes for each in self.classes for move in each.moves if move.kind == "ssd_read")

    def without_ssd_moves(self) -> "Job":
        """Return the job as if drives took no time."""
        classes = [
            replace(each, moves=tuple(move for move in each.moves if move.kind not in SSD_MOVES))
            for each in self.classes
        ]
        return replace(self, classes=tuple(classes))

    def in_memory(self) -> "Job":
        """Return the job as if memory were large enough: nothing has a tier, and nothing moves from or to drives."""
        job = self.without_ssd_moves()
        return replace(
            job, classes=tuple(replace(each, tier=None) for each in job.classes), num_records=0, num_visits=0
        )

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
