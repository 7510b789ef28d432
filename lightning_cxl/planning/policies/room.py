"""`Room`: what tiers have left while a policy hands them out."""

import math
from collections.abc import Mapping

from lightning_cxl.errors import TierFullError
from lightning_cxl.machine.machine import Machine, MachineTier, Split
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.jobs.job import Job
from lightning_cxl.ssd_options import SSD
from lightning_cxl.units import format_bytes


class Room:
    """Counts down the capacities of a machine's memory tiers, and what they may hold together.

    Args:
        job: what decorators and rules fix is taken first.
        machine: what is fixed on its tier `ssd` takes nothing of memory.

    Raises:
        TierFullError: what is fixed does not fit.
    """

    def __init__(self, job: Job, machine: Machine) -> None:
        self._machine = machine
        self.tiers: tuple[MachineTier, ...] = machine.tiers
        self._left = {tier.name: tier.capacity_bytes for tier in self.tiers}
        self.together = machine.memory_bytes
        """Bytes that all tiers together still have."""
        for each in job.classes:
            if each.tier not in (None, SSD):
                self.take(each.role, each.nbytes, {each.tier: 1.0})

    def left(self, tier: str) -> int:
        """Return the bytes that a tier still has."""
        return min(self._left[tier], self.together)

    def take(self, role: TensorRole, nbytes: int, split: Split) -> None:
        """Use up `nbytes` of a role, by tier.

        Raises:
            TierFullError: a tier has less left than its part; nothing is taken then.
        """
        parts = in_whole_bytes(nbytes, split, self._left)
        over = [tier for tier, part in parts.items() if part > self._left[tier]]
        if over or nbytes > self.together:
            raise self.full(role.value, nbytes, over[0] if over else "` and `".join(split))
        for tier, part in parts.items():
            self._left[tier] -= part
        self.together -= nbytes

    def full(self, what: str, nbytes: int, tier: str) -> TierFullError:
        """Return the error that says what does not fit where: a role, or all of a job."""
        have = ", ".join(f"`{name}` {format_bytes(left)}" for name, left in self._left.items())
        if self.together < sum(self._left.values()):
            have += f", {format_bytes(self.together)} together"
        return TierFullError(
            f"cannot place {what} ({format_bytes(nbytes)}) on tier `{tier}`: machine `{self._machine.name}` has "
            f"left {have}. Add memory or a tier, raise the budget in `tiers`, or use a smaller model, batch "
            f"or sequence."
        )


def in_whole_bytes(nbytes: int, split: Split, left: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of every tier of a split, `nbytes` in all.

    Fractions are cut off, and the bytes that this leaves go, one to a tier, first to those that have room.

    Args:
        nbytes: to be handed out.
        split: over tiers.
        left: bytes that each of these tiers still has.
    """
    parts = {tier: math.floor(share * nbytes) for tier, share in split.items()}
    in_turn = sorted(parts, key=lambda tier: parts[tier] >= left[tier])
    for tier in in_turn[: nbytes - sum(parts.values())]:
        parts[tier] += 1
    return parts
