"""`Room`: what tiers have left while a policy hands them out."""

from lightning_cxl.errors import TierFullError
from lightning_cxl.planner.job import Job
from lightning_cxl.planner.machine import Machine, MachineTier, Split
from lightning_cxl.tiers.placement import TensorRole
from lightning_cxl.tiers.topology import TierKind
from lightning_cxl.units import format_bytes


class Room:
    """Counts down the capacities of a machine's memory tiers. A tier backed by another one shares its count.

    Args:
        job: what decorators and rules fix is taken first.
        machine: SSDs are left out: tensors cannot live there.

    Raises:
        TierFullError: what is fixed does not fit.
    """

    def __init__(self, job: Job, machine: Machine) -> None:
        self._machine = machine
        self.tiers: tuple[MachineTier, ...] = tuple(t for t in machine.tiers if t.kind is not TierKind.SSD)
        self._left = {t.name: t.capacity_bytes for t in self.tiers if t.backed_by is None}
        for each in job.classes:
            if each.tier is not None:
                self.take(each.role, each.nbytes, {each.tier: 1.0})

    def left(self, tier: str) -> int:
        """Return the bytes that a tier still has."""
        return self._left[self._machine.tier(tier).backed_by or tier]

    def take(self, role: TensorRole, nbytes: int, split: Split) -> None:
        """Use up `nbytes` of a role, by tier.

        Raises:
            TierFullError: a tier has less left than its part, by more than rounding; nothing is taken then.
        """
        wanted: dict[str, float] = {}
        for tier, share in split.items():
            name = self._machine.tier(tier).backed_by or tier
            wanted[name] = wanted.get(name, 0.0) + share * nbytes
            if wanted[name] > self._left[name] + 1:
                raise self.full(role, nbytes, tier)
        for name, size in wanted.items():
            self._left[name] = max(0, self._left[name] - round(size))

    def full(self, role: TensorRole, nbytes: int, tier: str) -> TierFullError:
        """Return the error that says what does not fit where."""
        have = ", ".join(f"`{name}` {format_bytes(left)}" for name, left in self._left.items())
        return TierFullError(
            f"cannot place {role.name} ({format_bytes(nbytes)}) on tier `{tier}`: left for it are {have} of machine "
            f"`{self._machine.name}`. Add memory or a tier, raise the budget in `tiers`, or use a smaller model, batch "
            f"or sequence."
        )
