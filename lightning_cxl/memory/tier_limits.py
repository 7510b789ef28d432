"""`TierLimits`: the most bytes that one process holds of each tier, and which of these limits a user has set."""

from collections.abc import Mapping

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.topology import Tier, Topology


class TierLimits:
    """Limits by tier.

    Args:
        topology: the machine.
        budgets: what the user allows of a tier.
        room: what this process may take of a tier without a budget, where others share the machine; None: all.

    Raises:
        ConfigError: a budget is negative.
        TierNotFoundError: a budget for a tier that does not exist.
    """

    def __init__(
        self, topology: Topology, budgets: Mapping[str, int] | None = None, room: Mapping[str, int] | None = None
    ) -> None:
        self._topology = topology
        self._budgets = dict(budgets or {})
        self._room = dict(room or {})
        for name, budget in self._budgets.items():
            topology.tier(name)
            if budget < 0:
                raise ConfigError(f"the budget of tier `{name}` must not be negative, got {budget}")

    def has_budget(self, tier: Tier) -> bool:
        """Return whether the user has limited a tier."""
        return tier.name in self._budgets

    def of(self, tier: Tier) -> int:
        """Return the most bytes of a tier; of one that DRAM stands in for, as of DRAM."""
        if tier.name in self._budgets:
            return self._budgets[tier.name]
        behind = self._topology.node_tier(tier.node_ids[0]) if tier.emulated else tier
        return self._room.get(tier.name if behind is None else behind.name, tier.capacity_bytes)
