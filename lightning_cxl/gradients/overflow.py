"""`OverflowGuard`: what happens when a gradient is infinite or not a number."""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from lightning_cxl.errors import GradientOverflowError, LightningCXLWarning
from lightning_cxl.gradients.meter import GradientMeter
from lightning_cxl.shards import first_over_processes

log = logging.getLogger(__name__)

OnOverflow = Literal["skip", "error", "ignore"]
_ADVICE = (
    "Lower the learning rate or the initial loss scale, clip gradients, check the data and the loss, or find the "
    "operation with `torch.autograd.set_detect_anomaly(True)`."
)


@dataclass(slots=True)
class _Record:
    """What is known of one optimizer's gradients."""

    streak: int = 0
    """Steps left out in a row."""
    seen: torch.Tensor | None = None
    """The parameter whose gradient was bad before gradients were clipped in place."""


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
        self._records: WeakKeyDictionary[Optimizer, _Record] = WeakKeyDictionary()
        self.num_skipped = 0
        """Steps left out in the whole run."""
        self.num_steps = 0
        """Steps of optimizers in the whole run, with those left out; each evaluation of a closure counts."""

    def accepts(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], *, can_skip: bool = True) -> bool:
        """Return whether a step of `optimizer` may use the gradients of `parameters`; warns the first time it may not.

        Args:
            optimizer: that is to step.
            parameters: those with a gradient.
            can_skip: whether the step can still be left out.

        Raises:
            GradientOverflowError: it must not, and the run shall stop.
        """
        self.num_steps += 1
        if self._action == "ignore":
            return True
        record = self._record_of(optimizer)
        seen, record.seen = record.seen, None
        bad = self.first_bad(parameters)
        if bad is None:
            record.streak = 0
            return True
        bad = bad if seen is None else seen
        if not can_skip:
            raise GradientOverflowError(
                f"{self._found(bad)}, in the middle of a step of {type(optimizer).__name__} that has changed weights "
                f'already and cannot be left out. {_ADVICE} `on_overflow="ignore"` does not look.'
            )
        self.refuse(optimizer, bad)
        return False

    def look(self, optimizer: Optimizer) -> None:
        """Remember which gradient is bad before all are, for the message: they are about to be clipped in place."""
        if self._action != "ignore":
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._record_of(optimizer).seen = self.first_bad(parameters)

    def first_bad(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the first parameter whose gradient has an element that is not finite, on any process: all agree."""
        with_grad = [parameter for parameter in parameters if parameter.grad is not None]
        sums = self._meter.sums_of(with_grad)
        here = next((index for index, value in enumerate(sums) if not math.isfinite(value)), None)
        first = first_over_processes(with_grad, here)
        return None if first is None else with_grad[first]

    def refuse(self, optimizer: Optimizer, parameter: torch.Tensor, *, expected: bool = False) -> None:
        """Count a step of `optimizer` that is left out because of `parameter`'s gradient.

        Args:
            optimizer: each has a streak of its own.
            parameter: the first one.
            expected: a loss scaler is looking for its scale: no error by itself.

        Raises:
            GradientOverflowError: that was one too many.
        """
        self.num_skipped += 1
        if self._action == "ignore":  # a loss scaler leaves the step out all the same
            return
        streak = self._record_of(optimizer).streak = self._record_of(optimizer).streak + 1
        found = self._found(parameter)
        if self._action == "error" and not expected:
            raise GradientOverflowError(f'{found}. {_ADVICE} `on_overflow="skip"` leaves such steps out.')
        if streak >= self._limit:
            raise GradientOverflowError(f"{found}, in {streak} steps in a row (`max_overflows`). {_ADVICE}")
        if streak == 1:
            warnings.warn(
                f"{found}: this step is left out, weights stay as they are.", LightningCXLWarning, stacklevel=2
            )
        log.info(f"{found}: step left out, {streak} in a row, {self.num_skipped} in all")

    def _found(self, parameter: torch.Tensor) -> str:
        return f"the gradient of `{self._name_of(parameter)}` has elements that are infinite or not a number"

    def _record_of(self, optimizer: Optimizer) -> _Record:
        return self._records.setdefault(optimizer, _Record())
