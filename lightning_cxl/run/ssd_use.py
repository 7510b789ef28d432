"""`SsdUse`: what a run has stored on, and moved from and to, the tier `ssd`: measured, for its report."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_cxl.machine.topology import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdUse:
    """What the tier `ssd` holds now, and what a run has moved so far."""

    used_bytes: int = 0
    """Of records, all versions."""
    peak_bytes: int = 0
    """Most that these have been."""
    held_bytes: int = 0
    """Of the files."""
    read_bytes: int = 0
    """In `num_steps`, as all that follows."""
    written_bytes: int = 0
    num_steps: float = 0.0
    """Of the optimizer; the first is not counted."""
    seconds: float = 0.0
    """With everything between the steps."""


class Pace:
    """Measures what steps move, from the end of the first one on: that one makes the state, and starts the device."""

    def __init__(self) -> None:
        self._first: tuple[float, Mapping[str, int]] | None = None
        self._last: tuple[float, Mapping[str, int]] = (0.0, {})

    def note(self, counts: Mapping[str, int], num_records: int) -> None:
        """Note between two steps what was moved since the run began.

        Args:
            counts: ``read_bytes``, ``written_bytes``, and ``num_visits``: how often a record was updated, or of steps.
            num_records: that one step updates; 1 where steps are counted.
        """
        if counts["num_visits"] == self._last[1].get("num_visits"):
            return  # between micro-batches of one step
        self._last = time.monotonic(), {**counts, "num_records": num_records}
        if self._first is None and counts["num_visits"] >= num_records:
            self._first = self._last

    def of_steps(self) -> dict[str, Any]:
        """Return the fields of `SsdUse` that are about steps; none before the second step is over."""
        if self._first is None:
            return {}
        (start, before), (end, after) = self._first, self._last
        moved = {name: after[name] - before[name] for name in ("read_bytes", "written_bytes", "num_visits")}
        return {
            "read_bytes": moved["read_bytes"],
            "written_bytes": moved["written_bytes"],
            "num_steps": moved["num_visits"] / after["num_records"],
            "seconds": end - start,
        }


def tier_row(tier: Tier, use: SsdUse) -> dict[str, int]:
    """Return the row of the tier in the report's table of tiers."""
    return {
        "capacity_bytes": tier.capacity_bytes,
        "budget_bytes": tier.capacity_bytes,
        "used_bytes": use.used_bytes,
        "peak_bytes": use.peak_bytes,
        "held_bytes": use.held_bytes,
    }


def io_data(use: SsdUse) -> dict[str, Any]:
    """Return what a step has moved, JSON-able; empty before the first step."""
    if not use.num_steps or not use.written_bytes:
        return {}
    return {
        "num_steps": use.num_steps,
        "step_seconds": use.seconds / use.num_steps if use.seconds > 0 else None,
        "read_bytes_per_step": use.read_bytes / use.num_steps,
        "written_bytes_per_step": use.written_bytes / use.num_steps,
    }
