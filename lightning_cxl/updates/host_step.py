"""The step of an optimizer on the host: gradients come in, new state is placed, masters are written back."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.optim import LBFGS, Optimizer

from lightning_cxl.optim.awaited_params import plain
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.torch_private import keeps_mark, mark_as_called, step_hooks

AllocationScope = Callable[[], AbstractContextManager[Any]]
"""Opens a region in which host tensors that torch creates are placed as optimizer state."""

_CLOSURE_FIRST = ("torch.optim.", "lightning_cxl.")  # whose `step` evaluates the closure once, before everything else


class StepHooks(Protocol):
    """What happens around an update, and the update itself."""

    def before_closure(self, optimizer: Optimizer) -> None:
        """Learn that the backward of a step of `optimizer` comes next."""

    def closure_failed(self) -> None:
        """Learn that it has raised an error."""

    def update(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        """Make the step, by calling `step` or in parts."""

    def scope(self) -> AbstractContextManager[Any]:
        """Return a region in which host tensors that torch creates are placed as optimizer state."""

    def before_update(self) -> None:
        """Bring gradients and masters up to date."""

    def accepts(self, optimizer: Optimizer, parameters: list[torch.Tensor], *, can_skip: bool) -> bool:
        """Return whether `optimizer` may use the gradients of `parameters`; if not, its step is left out.

        Raises an error where it may not and the step has written to weights already, so that it cannot be left out.
        """

    def after_update(self, optimizer: Optimizer, updated: list[torch.Tensor]) -> None:
        """Write masters back for the parameters that had a gradient, and place state that is not placed yet."""


class Overlap(Protocol):
    """Makes the steps of CPUAdam in parts, behind what the device does."""

    def begin(self, optimizer: CPUAdam) -> None:
        """Note that the closure of a step of `optimizer` is about to be evaluated."""

    def give_up(self) -> None:
        """Note that it has failed."""

    def update(self, optimizer: CPUAdam) -> None:
        """Make a step with the gradients that parameters have."""

    def wait(self) -> None:
        """Return when every update is done."""


@keeps_mark
class HostStep:
    """Replaces `optimizer.step` of one optimizer object.

    torch's optimizers evaluate the closure (forward and backward) once and first: it runs here, outside the allocation
    scope, and only the update itself runs inside, as long as there are parameters without state; its closure returns
    the loss. Any other optimizer, and LBFGS, may evaluate it when and as often as it likes: it gets one that writes
    masters out before and brings gradients in after, and its new state is placed after the step. Where those gradients
    may not be used, the step ends there: nothing has happened yet as long as it has not written to a parameter.

    Args:
        optimizer: the `step` it has now does the work.
        hooks: see there.
    """

    def __init__(self, optimizer: Optimizer, hooks: StepHooks) -> None:
        self._optimizer = optimizer
        self._hooks = hooks
        self._step = optimizer.step
        self._previous = optimizer.__dict__.get("step")  # a scheduler's wrapper, if there is one
        # of a step that evaluates its closure itself:
        self._versions: list[int] = []  # of the parameters when it began
        self._can_skip = True  # it had not written to them when it evaluated the closure

    def __call__(self, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        """Run one step; same contract as the optimizer's own `step`, which gets the keywords.

        Returns:
            What the optimizer's `step` returns; the loss where the step was left out.
        """
        optimizer = self._optimizer
        if keywords and isinstance(optimizer, CPUAdam):
            raise TypeError(f"{type(optimizer).__name__}.step() takes `closure` only, not {', '.join(keywords)}")
        mark_as_called(optimizer)
        if closure is not None and not evaluates_closure_first(optimizer):
            return self._step_evaluating(closure, keywords)
        loss = None
        if closure is not None:
            self._hooks.before_closure(optimizer)
            try:
                with torch.enable_grad():
                    loss = closure()
            except BaseException:
                self._hooks.closure_failed()
                raise
        self._hooks.before_update()
        active = [p for p in _parameters(optimizer) if p.grad is not None]
        if not self._accepts(active):
            return loss
        evaluated: dict[str, Any] = {} if closure is None else {"closure": lambda: loss}
        result = loss

        def step() -> None:
            nonlocal result
            result = self._step(**evaluated, **keywords)

        if isinstance(optimizer, CPUAdam) or all(optimizer.state.get(p) for p in active):
            self._hooks.update(optimizer, step)
        else:
            with self._hooks.scope():
                self._hooks.update(optimizer, step)
        self._hooks.after_update(optimizer, active)
        return result

    def _step_evaluating(self, closure: Callable[[], Any], keywords: dict[str, Any]) -> Any:
        """Run a step that evaluates the closure itself; given up where the closure finds gradients it may not use."""
        self._hooks.before_closure(self._optimizer)
        self._versions = self._versions_now()
        try:
            result = self._step(_Synchronised(closure, self._before_closure, self._after_closure), **keywords)
        except _StepLeftOut as left_out:
            return left_out.loss
        self._write_out()
        return result

    def _before_closure(self) -> None:
        self._can_skip = self._versions == self._versions_now()
        self._write_out()

    def _after_closure(self, loss: Any) -> None:
        self._hooks.before_update()
        active = [p for p in _parameters(self._optimizer) if p.grad is not None]
        if not self._accepts(active, can_skip=self._can_skip):
            raise _StepLeftOut(loss)

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in _parameters(self._optimizer)]

    def _accepts(self, parameters: list[torch.Tensor], *, can_skip: bool = True) -> bool:
        accepted = False
        try:
            accepted = self._hooks.accepts(self._optimizer, parameters, can_skip=can_skip)
        finally:
            if not accepted and isinstance(self._optimizer, CPUAdam):
                self._optimizer.grad_scale = 1.0  # was for the step that is left out
        return accepted

    def remove(self) -> None:
        """Give the optimizer the `step` back that it had."""
        if self._previous is None:
            self._optimizer.__dict__.pop("step", None)
        else:
            self._optimizer.step = self._previous  # type: ignore[method-assign]

    def _write_out(self) -> None:
        self._hooks.after_update(self._optimizer, list(_parameters(self._optimizer)))


class _Synchronised:
    """A closure evaluated inside a step: masters go out before it, gradients come in after."""

    def __init__(self, closure: Callable[[], Any], before: Callable[[], None], after: Callable[[Any], None]) -> None:
        self._closure = closure
        self._before = before
        self._after = after

    def __call__(self) -> Any:
        self._before()
        with torch.enable_grad():
            loss = self._closure()
        self._after(loss)
        return loss


class _StepLeftOut(Exception):
    """Ends a step from inside its closure: the gradients may not be used."""

    def __init__(self, loss: Any) -> None:
        super().__init__("the gradients of this step are not finite")
        self.loss = loss


def evaluates_closure_first(optimizer: Optimizer) -> bool:
    """Whether the optimizer's `step` is known to evaluate its closure once, before it touches anything."""
    owner = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return owner.__module__.startswith(_CLOSURE_FIRST) and not issubclass(owner, LBFGS)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether someone has put hooks around the step, of this optimizer or of all, which may look at anything."""
    return any(step_hooks(optimizer))


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from plain(group["params"])
