"""Predicted seconds of single operations: one Adam update, one copy."""

import math
from collections.abc import Sequence


def soft_maximum(seconds: Sequence[float], sharpness: float) -> float:
    """Return the `sharpness`-norm of some durations: at least the longest, more if others are about as long."""
    longest = max(seconds)
    if longest <= 0 or math.isinf(sharpness):
        return longest
    return float(longest * sum((each / longest) ** sharpness for each in seconds) ** (1 / sharpness))
