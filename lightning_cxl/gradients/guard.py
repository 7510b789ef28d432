"""`GradientMeter` and `OverflowGuard`: norms of gradients, and the step where one is infinite or not a number."""

import logging
import math
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_cxl.errors import GradientOverflowError, warn
from lightning_cxl.memory.host_memory import is_dense
from lightning_cxl.native import _grads
from lightning_cxl.optim.cpu_adam import CPUAdam, gradients, kernel_can_read, sums_of_squares
from lightning_cxl.optim.kernels import GRAD_FORMATS, chosen_isa, same_layout, thread_count
from lightning_cxl.shards import first_over_processes, local
from lightning_cxl.torch_private import hooks_after_accumulation, unscale

# `GradientMeter`: sums of squares of gradients, taken in the sweep that moves them and kept with them.
#
# [Note: Measured gradients]
# The sum of squares of a gradient serves clipping (the norm) and the overflow check (it is finite if and only if every
# element is). `GradientOffload` measures whole gradients in the sweep that writes them, and the number is kept on the
# tensor object together with its version counter. At the end of backward only these numbers are combined; a gradient
# that was written since, by autograd or by a user's hook, has another version and is measured again in one read. Writes
# through ``.data`` leave the version as it is: where user code may do that, `trusts_versions` is off, and the number of
# a parameter that has hooks of the user is not used.

# Hooks around autograd's accumulation into one leaf parameter.
#
# [Note: Which hooks stay]
# Autograd's node of a leaf is made anew whenever the leaf's data changes its device, and hooks on the old node are
# lost. Hooks on the tensor itself stay, but those before the accumulation also run when `torch.autograd.grad` asks for
# the leaf's gradient. So a parameter that stays where it is has its first hook on the node, others have both on the
# tensor.
#
# The gradient of such another parameter may come while it is not where it was used: that of a bias that is added last
# needs nothing that is recomputed, so it comes before the unit is entered. Autograd takes it as it is, but copies one
# that others hold as well, such as the gradient of the output itself, to where the parameter is then. So the hook
# before gives it one of its own.
#
# Torch keeps hooks where the garbage collector does not look: they are removed when a run is closed.


class GradientHooks:
    """Calls `received` whenever autograd has added to ``parameter.grad``, and `before` just before that.

    Where the parameter `stays` on its device, `received` comes before hooks that the user has put on it so far; else
    after all, and `before` is also called for what `torch.autograd.grad` returns. See [Note: Which hooks stay].
    """

    def __init__(
        self,
        parameter: Parameter,
        received: Callable[[], None],
        before: Callable[[], None] | None = None,
        *,
        stays: bool,
    ) -> None:
        was_trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # autograd accepts hooks on trainable tensors only
        self._parameter = weakref.ref(parameter)  # whose hooks are ours: no circle
        self._received = received
        self._before = before
        handle = parameter.register_post_accumulate_grad_hook(self._after_hook)  # type: ignore[no-untyped-call]
        self._handles: list[Any] = [handle]
        self._key: int = handle.id
        self._hooks: Any = hooks_after_accumulation(parameter)
        self._node: Any = None
        if stays:
            for key in [key for key in self._hooks if key != self._key]:
                self._hooks[key] = self._hooks.pop(key)  # to the end, in their order
        if before is not None and stays:
            self._node = torch.autograd.graph.get_gradient_edge(parameter).node  # lives as long as somebody holds it
            self._handles.append(self._node.register_prehook(self._before_node))
        elif not stays:
            self._handles.append(parameter.register_hook(self._before_hook))  # type: ignore[no-untyped-call]
        parameter.requires_grad_(was_trainable)

    @property
    def are_alone(self) -> bool:
        """Whether no other hook sees what has been accumulated."""
        return len(self._hooks) == 1

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._node = None

    def _before_hook(self, grad: torch.Tensor) -> torch.Tensor | None:
        self._hooks[self._key] = self._hooks.pop(self._key)  # after those that have come since
        with torch.no_grad():
            if self._before is not None:
                self._before()
            parameter = self._parameter()
            if grad.requires_grad or parameter is None or grad.device == parameter.device:
                return None
            if grad.layout is not torch.strided:
                return None
            # autograd keeps this one as it is, and does not copy it to where the parameter is
            own = torch.empty_strided(parameter.shape, parameter.stride(), dtype=grad.dtype, device=grad.device)
            return own.copy_(grad)

    def _before_node(self, _grads: tuple[torch.Tensor, ...]) -> None:
        assert self._before is not None
        with torch.no_grad():
            self._before()

    def _after_hook(self, _parameter: torch.Tensor) -> None:
        with torch.no_grad():
            self._received()


_NOTE = "_cxl_sum_of_squares"


class Addition(NamedTuple):
    source: torch.Tensor
    accumulator: torch.Tensor
    key: int


class _Note:
    """The sum of squares of one tensor, as long as it has one version. Copies and pickles of the tensor have none."""

    __slots__ = ("_tensor", "_value", "_version")

    def __init__(self, tensor: torch.Tensor, value: float) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = tensor._version
        self._value = value

    @staticmethod
    def of(tensor: torch.Tensor) -> float | None:
        note = getattr(tensor, _NOTE, None)
        if isinstance(note, _Note) and note._tensor() is tensor and note._version == tensor._version:
            return note._value
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()  # an empty set in its place, which `torch.load` takes without further ado


class GradientMeter:
    """Copies, adds and measures gradients with the compiled kernels; torch does what these cannot."""

    def __init__(self, num_threads: int | None = None, isa: str | None = None) -> None:
        self.num_threads = thread_count(num_threads)
        self._isa = chosen_isa(isa)
        self.trusts_versions = True
        """Whether a gradient of the same version is taken to be unchanged. See [Note: Measured gradients]."""

    def copy_all(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Set the second tensor of each copy to the first and measure it; float32 takes any floating point dtype."""
        rows, written = array("Q"), []
        for source, destination in copies:
            same_or_wider = destination.dtype in (source.dtype, torch.float32)
            if same_or_wider and _kernel_can_move(local(source), local(destination)):
                rows.extend(_row(local(source), local(destination)))
                written.append(destination)
            else:
                local(destination).copy_(local(source))
        self._sweep(_grads.copy, rows, written)

    def accumulate_all(self, additions: Sequence[Addition]) -> None:
        """Add to different accumulators and measure the sums; bfloat16 is rounded stochastically, depending on keys."""
        rows, written = array("Q"), []
        for source, accumulator, key in additions:
            known = accumulator.dtype in (torch.float32, torch.bfloat16)
            if known and _kernel_can_move(local(source), local(accumulator)):
                rows.extend(_row(local(source), local(accumulator), key))
                written.append(accumulator)
            else:
                local(accumulator).add_(local(source))
                torch.autograd.graph.increment_version([accumulator])
        self._sweep(_grads.accumulate, rows, written)

    def _sweep(self, kernel: Callable[..., None], rows: "array[int]", written: Sequence[torch.Tensor]) -> None:
        if not written:
            return
        results = array("d", bytes(8 * len(written)))
        kernel(rows, results, self.num_threads, self._isa)
        torch.autograd.graph.increment_version(written)
        for grad, value in zip(written, results, strict=True):
            setattr(grad, _NOTE, _Note(grad, value))

    def sums(self, grads: Sequence[torch.Tensor]) -> list[float]:
        """Return the sum of squares of each host gradient; of those not measured yet in one sweep over all of them."""
        sums = [_Note.of(grad) if self.trusts_versions else None for grad in grads]
        missing = [index for index, value in enumerate(sums) if value is None]
        if missing:
            measured = sums_of_squares([grads[index] for index in missing], self.num_threads, self._isa)
            for index, value in zip(missing, measured, strict=True):
                sums[index] = value
                setattr(grads[index], _NOTE, _Note(grads[index], value))
        return [value for value in sums if value is not None]

    def sums_of(self, parameters: Iterable[torch.Tensor]) -> list[float]:
        """Return the sums of the gradients that `parameters` have, as they are after hooks on the parameters."""
        parameters = list(parameters)
        for parameter in parameters:
            hooks = hooks_after_accumulation(parameter) if parameter.grad is not None else {}
            if not all(isinstance(getattr(hook, "__self__", None), GradientHooks) for hook in hooks.values()):
                vars(parameter.grad).pop(_NOTE, None)  # a user's hook may have edited it through `.data` since
        return self.sums(gradients(parameters))


def _row(source: torch.Tensor, destination: torch.Tensor, key: int = 0) -> tuple[int, ...]:
    formats = GRAD_FORMATS[source.dtype], GRAD_FORMATS[destination.dtype]
    return source.data_ptr(), destination.data_ptr(), source.numel(), *formats, key


def _kernel_can_move(source: torch.Tensor, destination: torch.Tensor) -> bool:
    return (
        kernel_can_read(source) and is_dense(destination) and same_layout(source, destination) and not source.is_neg()
    )


class ReplacedMethod:
    """Stands in for a method of an object during a run. A copy or a pickle gets the plain method."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _same_object, (self._plain,)


def _same_object(value: Any) -> Any:
    return value


log = logging.getLogger(__name__)

OnOverflow = Literal["skip", "error", "ignore"]
_ADVICE = (
    "Lower the learning rate or the initial loss scale, clip gradients, check the data and the loss, or find the "
    "operation with `torch.autograd.set_detect_anomaly(True)`."
)


class OverflowGuard:
    """Keeps an optimizer from being stepped with gradients that are not finite."""

    def __init__(
        self, action: OnOverflow, limit: int, name_of: Callable[[torch.Tensor], str], meter: GradientMeter
    ) -> None:
        self._action = action
        self._limit = limit
        self._name_of = name_of
        self._meter = meter
        self._streaks: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # steps left out in a row
        # the parameter whose gradient was bad before gradients were clipped in place
        self._seen: WeakKeyDictionary[Optimizer, Tensor | None] = WeakKeyDictionary()
        self._came_first: Tensor | None = None  # the first parameter of the run whose gradient was bad as it came
        self._has_refused = False
        self.num_skipped = 0  # steps left out in the whole run
        self.num_steps = 0  # of optimizers in the whole run, with those left out; each evaluation of a closure counts

    def accepts(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], *, can_skip: bool = True) -> bool:
        """Return whether a step of `optimizer` may use the gradients of `parameters`; warn the first time if not."""
        self.num_steps += 1
        if self._action == "ignore":
            return True
        seen = self._seen.pop(optimizer, None)
        bad = self.first_bad(parameters)
        if bad is None:
            self._streaks[optimizer] = 0
            return True
        bad = bad if seen is None else seen
        if not can_skip:
            raise GradientOverflowError(
                f"{self._found(bad)}, in the middle of a step of {type(optimizer).__name__} that has changed weights "
                f'already and cannot be left out. {_ADVICE} `on_overflow="ignore"` does not look.'
            )
        self.refuse(optimizer, bad)
        return False

    def look(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Measure gradients by parameter as they come: whoever asks later finds the sums."""
        if self._meter.trusts_versions:  # else they are measured when all have come, whatever is known of them
            self._find_bad(gradients)

    def check(self, gradients: Mapping[Tensor, Tensor]) -> bool:
        """Return whether an update that runs behind the backward may use its gradients; raise if no other has failed.

        One error ends the run. Whoever saves weights after it should not meet that of the next unit.
        """
        bad = self._find_bad(gradients) if self._action == "error" else None
        if bad is not None and not self._has_refused:
            self._has_refused = True
            assert self._came_first is not None  # noted where `bad` was found, if not before
            raise GradientOverflowError(
                f"{self._found(self._came_first)}. Weights whose gradients came before it are updated already, the "
                f'others are not: go on from a checkpoint. {_ADVICE} `on_overflow="skip"` leaves such steps out.'
            )
        return bad is None

    def _find_bad(self, gradients: Mapping[Tensor, Tensor]) -> Tensor | None:
        sums = self._meter.sums(list(gradients.values()))
        bad = next((each for each, value in zip(gradients, sums, strict=True) if not math.isfinite(value)), None)
        if self._action == "error" and self._came_first is None:  # which ends the run
            self._came_first = bad
        return bad

    def note_bad(self, optimizer: Optimizer) -> None:
        """Remember which gradient is bad before all are, for the message: they are about to be clipped in place."""
        if self._action != "ignore":
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._seen[optimizer] = self.first_bad(parameters)

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
        streak = self._streaks[optimizer] = self._streaks.get(optimizer, 0) + 1
        found = self._found(parameter)
        if self._action == "error" and not expected:
            raise GradientOverflowError(f'{found}. {_ADVICE} `on_overflow="skip"` leaves such steps out.')
        if streak >= self._limit:
            raise GradientOverflowError(f"{found}, in {streak} steps in a row (`max_overflows`). {_ADVICE}")
        if streak == 1:
            warn(f"{found}: this step is left out, weights stay as they are.")
        log.info(f"{found}: step left out, {streak} in a row, {self.num_skipped} in all")

    def _found(self, parameter: torch.Tensor) -> str:
        return f"the gradient of `{self._name_of(parameter)}` has elements that are infinite or not a number"


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
        self.factor = 1.0  # the last one that was left to a step: gradients still have to be multiplied by it

    def __call__(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
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


# Clipping of gradients by their norm, folded into the optimizer's own sweep.


class HostClip(ReplacedMethod):
    """`clip_grad_by_norm` of a precision plugin: for `CPUAdam` only the factor is computed, the step applies it.

    The norm comes from the sums that were taken as gradients arrived. ``.grad`` keeps the values from before clipping.
    Other optimizers get what the plugin does itself, and so does one whose gradients other code reads before its step
    (`defers`): the guard is told before, since clipping in place makes all gradients NaN when one is.
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
        target = self._unwrap(optimizer)
        if isinstance(target, CPUAdam) and self._defers(target):
            target.clip_grad_norm_(clip_val, scale=1.0 if self._unscale is None else self._unscale.factor)
        else:
            self._guard.note_bad(target)
            self._plain(optimizer, clip_val)
