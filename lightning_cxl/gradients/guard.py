"""`OverflowGuard`: what happens when a gradient is infinite or not a number."""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_cxl.errors import GradientOverflowError, LightningCXLWarning
from lightning_cxl.gradients.meter import GradientMeter
from lightning_cxl.optim.cpu_adam import CPUAdam, gradients
from lightning_cxl.shards import first_over_processes
from lightning_cxl.torch_private import unscale

# ----------------------------------------------------------------------------------------------------
# How stand-ins for methods travel: a copy or a pickle gets the method that they stand in for.


class ReplacedMethod:
    """Stands in for a method of an object while a run is going on; belongs to that run."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """Copy and pickle as the plain method."""
        return _same_object, (self._plain,)


def _same_object(value: Any) -> Any:
    return value


log = logging.getLogger(__name__)

OnOverflow = Literal["skip", "error", "ignore"]
_ADVICE = (
    "Lower the learning rate or the initial loss scale, clip gradients, check the data and the loss, or find the "
    "operation with `torch.autograd.set_detect_anomaly(True)`."
)


@dataclass(slots=True)
class _Record:
    streak: int = 0
    """Steps left out in a row."""
    seen: torch.Tensor | None = None
    """The parameter whose gradient was bad before gradients were clipped in place."""


class OverflowGuard:
    """Keeps an optimizer from being stepped with gradients that are not finite."""

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
        """Return whether a step of `optimizer` may use the gradients of `parameters`; warn the first time if not."""
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

    def note_bad(self, optimizer: Optimizer) -> None:
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
        """Count a step of `optimizer` that is left out because of `parameter`'s gradient."""
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


# ----------------------------------------------------------------------------------------------------
# A loss scaler, perhaps on a device, and gradients on the host.


class HostUnscale(ReplacedMethod):
    """`GradScaler._unscale_grads_` for gradients on the host.

    A scaler on a device copies its scale to the gradients' device without waiting, which is a race when that is the
    host: give it host copies that are complete. For `CPUAdam` nothing is multiplied: the step applies the factor, and
    the check uses the sums that were taken as gradients arrived.
    """

    def __init__(
        self,
        scaler: Any,
        unwrap: Callable[[Any], torch.optim.Optimizer],
        defers: Callable[[torch.optim.Optimizer], bool],
        guard: OverflowGuard,
    ) -> None:
        super().__init__(partial(unscale, scaler))
        self._unwrap = unwrap
        self._defers = defers
        self._guard = guard
        self.factor = 1.0
        """The last factor that was left to a step: gradients still have to be multiplied by it."""

    def __call__(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        """Unscale gradients on the host; see `torch.amp.GradScaler`."""
        host_scale, found = inv_scale.cpu(), found_inf.cpu()
        target = self._unwrap(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        bad = self._guard.first_bad(parameters)
        if bad is not None:
            self._guard.refuse(target, bad, expected=True)
        self.factor = 1.0
        if not (isinstance(target, CPUAdam) and self._defers(target)):
            result = self._plain(optimizer, host_scale, found, allow_fp16)
            torch.autograd.graph.increment_version(gradients(parameters))  # torch's kernel leaves versions as they are
            return result
        # set, not multiplied: the step that would have used the factor of before may have been left out
        self.factor = target.grad_scale = float(host_scale)
        return {torch.device("cpu"): found.fill_(0.0 if bad is None else 1.0)}


# ----------------------------------------------------------------------------------------------------
# Clipping of gradients by their norm, folded into the optimizer's own sweep.


class HostClip(ReplacedMethod):
    """`clip_grad_by_norm` of a precision plugin: for `CPUAdam` only the factor is computed, the step applies it.

    The norm comes from the sums that were taken as gradients arrived. ``.grad`` keeps the values from before clipping.

    Args:
        plain: what the plugin does itself; used for other optimizers, and where the factor is not left to the step.
        defers: whether the factor may be left to the optimizer's step, because no code reads gradients before it.
        guard: told before gradients are clipped in place, which makes all of them NaN when one is.
        unscale: has left a factor to the step, too; None without a loss scaler.
    """

    def __init__(
        self,
        plain: Callable[..., Any],
        unwrap: Callable[[Any], torch.optim.Optimizer],
        defers: Callable[[torch.optim.Optimizer], bool],
        guard: OverflowGuard,
        unscale: HostUnscale | None,
    ) -> None:
        super().__init__(plain)
        self._unwrap = unwrap
        self._defers = defers
        self._guard = guard
        self._unscale = unscale

    def __call__(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients of `optimizer` to a total norm of `clip_val`."""
        target = self._unwrap(optimizer)
        if isinstance(target, CPUAdam) and self._defers(target):
            target.clip_grad_norm_(clip_val, scale=1.0 if self._unscale is None else self._unscale.factor)
        else:
            self._guard.note_bad(target)
            self._plain(optimizer, clip_val)
