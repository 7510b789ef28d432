"""`OverflowGuard`: what happens when a gradient is infinite or not a number."""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from lightning_cxl.errors import GradientOverflowError, LightningCXLWarning
from lightning_cxl.optim.meter import GradientMeter

log = logging.getLogger(__name__)

OnOverflow = Literal["skip", "error", "ignore"]


class OverflowGuard:
    """Keeps an optimizer from being stepped with gradients that are not finite.

    Args:
        action: ``"skip"`` leaves the step out, ``"error"`` raises, ``"ignore"`` does not look.
        limit: consecutive steps left out after which the run stops.
        name_of: name of a parameter, for messages.
        meter: measures gradients.
    """

    def __init__(
        self, action: OnOverflow, limit: int, name_of: Callable[[torch.Tensor], str], meter: GradientMeter
    ) -> None:
        self._action = action
        self._limit = limit
        self._name_of = name_of
        self._meter = meter
        self._streak = 0
        self.num_skipped = 0
        """Steps left out in the whole run."""

    def accepts(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether a step may use the gradients of `parameters`; warns the first time it may not.

        Raises:
            GradientOverflowError: it must not, and the run shall stop.
        """
        if self._action == "ignore":
            return True
        bad = self.first_bad(parameters)
        if bad is None:
            self._streak = 0
            return True
        self.refuse(bad)
        return False

    def first_bad(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the first parameter whose gradient has an element that is not finite."""
        with_grad = [parameter for parameter in parameters if parameter.grad is not None]
        sums = self._meter.sums([p.grad for p in with_grad if p.grad is not None])
        return next((p for p, value in zip(with_grad, sums, strict=True) if not math.isfinite(value)), None)

    def refuse(self, parameter: torch.Tensor, *, expected: bool = False) -> None:
        """Count a step that is left out because of `parameter`'s gradient.

        Args:
            parameter: the first one.
            expected: a loss scaler is looking for its scale: no error by itself.

        Raises:
            GradientOverflowError: that was one too many.
        """
        self.num_skipped += 1
        if self._action == "ignore":  # a loss scaler leaves the step out all the same
            return
        self._streak += 1
        found = f"the gradient of `{self._name_of(parameter)}` has elements that are infinite or not a number"
        advice = (
            "Lower the learning rate or the initial loss scale, clip gradients (`gradient_clip_val`), check the data "
            "and the loss, or find the operation with `Trainer(detect_anomaly=True)`."
        )
        if self._action == "error" and not expected:
            raise GradientOverflowError(f'{found}. {advice} `on_overflow="skip"` leaves such steps out.')
        if self._streak >= self._limit:
            raise GradientOverflowError(f"{found}, in {self._streak} steps in a row (`max_overflows`). {advice}")
        if self._streak == 1:
            warnings.warn(
                f"{found}: this step is left out, weights stay as they are.", LightningCXLWarning, stacklevel=2
            )
        log.info(f"{found}: step left out, {self._streak} in a row, {self.num_skipped} in all")
