"""What is placed (`TensorRole`) and where it should go (`Placement`)."""

import enum
import math
from dataclasses import dataclass


class TensorRole(enum.Enum):
    """What a host tensor is for; the memory classes of arXiv 2507.03305, section on allocation."""

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
    """Where one tensor goes: the tiers it may use, in order of preference."""

    tiers: tuple[str, ...]
    """Tier names, first choice first; the others are where it may spill."""
    pinned: bool = False
    """Page-locked and registered with the device's driver. A policy may leave it: what a device copies of a model is
    page-locked anyway (`is_copied`), and with ``pin_memory=False``, or without such a device, nothing is."""
    reason: str = ""
    """Why, in a few words: shown by the report."""
    shares: tuple[float, ...] = ()
    """What fraction of the bytes goes to each of `tiers`, in stripes; those with 0 are where it may spill. Empty:
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
