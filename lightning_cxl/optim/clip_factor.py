"""Factors of the gradients: the one that clips them to a total norm, and where an optimizer keeps it for its step."""

import math
from typing import Any

import torch

from lightning_cxl.optim.awaited_params import plain
from lightning_cxl.optim.meter import GradientMeter


def clip_factor(sums: list[float], max_norm: float, scale: float) -> tuple[float, float]:
    """Return the norm of gradients times `scale`, and the factor that brings it down to `max_norm` (at most 1).

    As in ``torch.nn.utils.clip_grad_norm_``; a norm that is not a number gives such a factor.
    """
    norm = math.sqrt(math.fsum(sums)) * scale if all(map(math.isfinite, sums)) else sum(sums)
    factor = max_norm / (norm + 1e-6)
    return norm, 1.0 if factor > 1.0 else factor


def own_meter(num_threads: int, isa: str) -> GradientMeter:
    """Return the meter of an optimizer on its own: nobody tells it what happens to gradients between two readings."""
    meter = GradientMeter(num_threads, isa)
    meter.trusts_versions = False
    return meter


class GradScale:
    """Gives an optimizer `grad_scale`, and clipping that sets it.

    It is kept in a list, so that setting it through a wrapper that only passes attributes on, as Lightning's does, sets
    the optimizer's own.
    """

    _scale: list[float]
    param_groups: list[dict[str, Any]]
    meter: GradientMeter
    """Measures gradients: the optimizer's own, or in a run the one that measures them as they arrive."""

    @property
    def grad_scale(self) -> float:
        """Factor of the gradients in the next step, which sets it back to 1."""
        return self._scale[0]

    @grad_scale.setter
    def grad_scale(self, value: float) -> None:
        self._scale[0] = value

    def clip_grad_norm_(self, max_norm: float, *, scale: float = 1.0) -> float:
        """Let the next step clip the gradients to a total norm, without a sweep of its own.

        The norm comes from one read of those gradients that were not measured when they arrived; the step multiplies by
        the factor as it reads them. ``.grad`` keeps the values from before. Of several calls before a step the last
        one counts.

        Args:
            max_norm: what the norm is brought down to.
            scale: factor that the gradients still need, such as 1 / loss scale; the step applies it too.

        Returns:
            The norm before clipping, of the scaled gradients; infinite or NaN if an element is.
        """
        norm, factor = clip_factor(self.meter.sums_of(self._parameters()), max_norm, scale)
        # set, not multiplied: the step that a factor of before was for may have been left out
        self.grad_scale = scale * factor
        return norm

    def drop_stale_scale(self) -> None:
        """Forget a factor that is infinite or not a number, unless these gradients are: it was for others."""
        if math.isfinite(self.grad_scale):
            return
        if all(map(math.isfinite, self.meter.sums_of(self._parameters()))):
            self.grad_scale = 1.0

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in plain(group["params"])]
