"""Factors of the gradients: the one that clips them to a total norm, and where an optimizer keeps it for its step."""

import math


def clip_factor(sums: list[float], max_norm: float, scale: float) -> tuple[float, float]:
    """Return the norm of gradients times `scale`, and the factor that brings it down to `max_norm` (at most 1).

    As in ``torch.nn.utils.clip_grad_norm_``; a norm that is not a number gives such a factor.
    """
    norm = math.sqrt(math.fsum(sums)) * scale if all(map(math.isfinite, sums)) else sum(sums)
    factor = max_norm / (norm + 1e-6)
    return norm, 1.0 if factor > 1.0 else factor


class GradScale:
    """Gives an optimizer `grad_scale`.

    It is kept in a list, so that setting it through a wrapper that only passes attributes on, as Lightning's does, sets
    the optimizer's own.
    """

    _scale: list[float]

    @property
    def grad_scale(self) -> float:
        """Factor of the gradients in the next step, which sets it back to 1."""
        return self._scale[0]

    @grad_scale.setter
    def grad_scale(self, value: float) -> None:
        self._scale[0] = value
