"""`PlannedBytes`: the sums that the report shows beside measured bytes."""

from lightning_cxl.placement.placement import Placement, TensorRole
from lightning_cxl.planning.fit import split_bytes


class PlannedBytes:
    """Planned bytes by role and tier, and why they go there."""

    def __init__(self) -> None:
        self._bytes: dict[str, dict[str, int]] = {}
        self._reasons: dict[str, dict[str, None]] = {}  # an ordered set per role

    def add(self, role: TensorRole, nbytes: int, placement: Placement) -> None:
        """Count `nbytes` of a role for the tiers of its placement, by their shares."""
        tiers = self._bytes.setdefault(role.value, {})
        for tier, size in split_bytes(nbytes, placement).items():
            tiers[tier] = tiers.get(tier, 0) + size
        self._reasons.setdefault(role.value, {})[placement.describe()] = None

    def roles(self) -> dict[str, dict[str, int]]:
        """Return planned bytes by role and tier."""
        return {role: dict(tiers) for role, tiers in self._bytes.items()}

    def reasons(self) -> dict[str, list[str]]:
        """Return, by role, why its bytes go where they go."""
        return {role: list(reasons) for role, reasons in self._reasons.items()}
