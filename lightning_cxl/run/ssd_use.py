"""`SsdUse`: what a run has stored on, and moved from and to, the tier `ssd`: measured, for its report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_cxl.machine.topology import Tier
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.wear import Wear


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdUse:
    """What the tier `ssd` holds now, and what a run has moved so far."""

    used_bytes: int = 0
    """Of records, all versions."""
    peak_bytes: int = 0
    """Most that these have been."""
    held_bytes: int = 0
    """Of the files."""
    roles: Mapping[TensorRole, int] = field(default_factory=dict)
    """Bytes by role, one version."""
    read_bytes: int = 0
    """Since the run began."""
    written_bytes: int = 0
    num_steps: int = 0
    """Of the optimizer, since the run began."""
    seconds: float = 0.0
    """That these steps took, with everything between them."""


def tier_row(tier: Tier, use: SsdUse) -> dict[str, int]:
    """Return the row of the tier in the report's table of tiers."""
    return {
        "capacity_bytes": tier.capacity_bytes,
        "budget_bytes": tier.capacity_bytes,
        "used_bytes": use.used_bytes,
        "peak_bytes": use.peak_bytes,
        "held_bytes": use.held_bytes,
    }


def io_data(tier: Tier, use: SsdUse) -> dict[str, Any]:
    """Return what a step has moved and what that does to the drives, JSON-able; empty before the first step."""
    if not use.num_steps or not use.written_bytes:
        return {}
    seconds = use.seconds / use.num_steps if use.seconds > 0 else None
    wear = Wear(use.written_bytes / use.num_steps, tier.drive_bytes, seconds)
    return {
        "num_steps": use.num_steps,
        "step_seconds": seconds,
        "read_bytes_per_step": use.read_bytes / use.num_steps,
        **wear.as_data(),
        "text": wear.describe(),
    }
