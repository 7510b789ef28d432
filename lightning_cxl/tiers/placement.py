"""What is placed (`TensorRole`) and where it should go (`Placement`)."""

import enum
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


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one tensor goes: the tiers it may use, in order of preference."""

    tiers: tuple[str, ...]
    """Tier names, first choice first; the others are where it may spill."""
    pinned: bool = False
    """Page-locked and registered with the device driver (only when a CUDA device is in use)."""
    reason: str = ""
    """Why, in a few words: shown by the report."""

    def __post_init__(self) -> None:
        """Refuse a placement that names no tier."""
        if not self.tiers:
            raise ValueError("a Placement must name at least one tier")

    def describe(self) -> str:
        """Return e.g. ``"cxl, else dram, pinned (decorator on LlamaDecoderLayer)"``."""
        text = ", else ".join(self.tiers) + (", pinned" if self.pinned else "")
        return f"{text} ({self.reason})" if self.reason else text
