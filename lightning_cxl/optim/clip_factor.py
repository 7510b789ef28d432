"""The factor that clips gradients to a total norm."""

import math


def clip_factor(sums: list[float], max_norm: float, scale: float) -> tuple[float, float]:
    """Return the norm of gradients times `scale`, and the factor that brings it down to `max_norm` (at most 1).

    As in ``torch.nn.utils.clip_grad_norm_``; a norm that is not a number gives such a factor.
    """
    norm = math.sqrt(math.fsum(sums)) * scale if all(map(math.isfinite, sums)) else sum(sums)
    factor = max_norm / (norm + 1e-6)
    return norm, 1.0 if factor > 1.0 else factor
