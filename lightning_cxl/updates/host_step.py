"""`HostStep`: what happens at a step of an adopted optimizer: gradients in, checks, update, new weights out.

[Note: A step]
1. The optimizer's step begins: updates learn which one (`begin`), and may run behind the backward from here on.
2. The closure, if there is one, runs forward and backward. `CPUAdam` gets it evaluated, because its update may be made
   in parts. Every other optimizer evaluates it by itself, when and as often as it likes.
3. After each evaluation gradients are complete (`GradientSink.end_step`), nothing reads the masters any more
   (`prepare`), and the guard looks at the gradients. Where they may not be used, the step ends there, without an
   update. That is possible as long as the optimizer has written to none of its parameters; else the guard raises.
4. The update (`update`): by the optimizer's own step, or by `UnitUpdates` in parts.
5. The model gets the new weights (`write_back`), and state that the optimizer has made moves to its tier (`rehome`).

An optimizer that evaluates its closure again after it has written (LBFGS in its line search) finds the loss of the
weights it has written: they are written back before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from lightning_cxl.gradients.overflow import OverflowGuard
from lightning_cxl.gradients.sink import GradientSink
from lightning_cxl.optim.awaited_params import plain
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.torch_private import keeps_mark, mark_as_called
from lightning_cxl.updates.whole_updates import WholeUpdates


class StateMemory(Protocol):
    """Host memory for optimizer state, by the compute parameter that it belongs to."""

    def flat(self, parameter: torch.Tensor, role: TensorRole, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return an uninitialised 1-D tensor for state of a compute parameter."""

    def rehome(self, optimizer: Optimizer, compute_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move state of `optimizer` that lies in ordinary memory to where the policy wants it."""


@keeps_mark
class HostStep:
    """Stands in for `step` of one optimizer object. See [Note: A step].

    Args:
        optimizer: the `step` it has now makes the update.
        grads: brings gradients.
        guard: says whether they may be used.
        updates: makes the update, and gives the model the new weights.
        masters: knows the compute parameter of each master.
        memory: where the optimizer's state belongs.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        grads: GradientSink,
        guard: OverflowGuard,
        updates: WholeUpdates,
        masters: MasterWeights,
        memory: StateMemory,
    ) -> None:
        self._optimizer = optimizer
        self._grads = grads
        self._guard = guard
        self._updates = updates
        self._masters = masters
        self._memory = memory
        self._step = optimizer.step
        self._previous = optimizer.__dict__.get("step")  # a scheduler's wrapper, if there is one
        self._versions: dict[int, int] = {}  # of the parameters when the step began, by id
        self._evaluates_first = evaluates_first(optimizer)
        self._num_evaluations = 0  # of the closure of this step

    def __call__(self, closure: Callable[[], Any] | None = None, **keywords: Any) -> Any:
        """Run one step; same contract as the optimizer's own `step`, which gets the keywords.

        Returns:
            What the optimizer's `step` returns; the loss where the step was left out.
        """
        optimizer = self._optimizer
        if keywords and isinstance(optimizer, CPUAdam):
            raise TypeError(f"{type(optimizer).__name__}.step() takes `closure` only, not {', '.join(keywords)}")
        mark_as_called(optimizer)
        self._versions = {id(parameter): parameter._version for parameter in self._parameters()}
        self._num_evaluations = 0
        self._updates.begin(optimizer)
        try:
            if isinstance(optimizer, CPUAdam):
                return self._step_of_cpu_adam(optimizer, closure)
            return self._step_of_any_other(closure, keywords)
        except _StepLeftOut as left_out:
            return left_out.loss

    def _step_of_cpu_adam(self, optimizer: CPUAdam, closure: Callable[[], Any] | None) -> Any:
        try:
            loss = self._check(None) if closure is None else self._evaluate(closure)
        except BaseException:
            optimizer.grad_scale = 1.0  # was for the step that is left out
            raise
        updated = [parameter for parameter in self._parameters() if parameter.grad is not None]
        evaluated = () if closure is None else (lambda: loss,)
        result = self._updates.update(optimizer, partial(self._step, *evaluated), loss)
        self._updates.write_back(optimizer, updated)
        return result

    def _step_of_any_other(self, closure: Callable[[], Any] | None, keywords: dict[str, Any]) -> Any:
        _bring_to_host(self._optimizer)
        if closure is None:
            self._check(None)
            result = self._step(**keywords)
        else:
            result = self._step(partial(self._evaluate, closure), **keywords)
        updated = self._updated()
        # fused optimizers of torch, and those of bitsandbytes, write without a trace: copies must become old
        torch.autograd.graph.increment_version([p for p in updated if not self._is_written(p)])
        self._updates.write_back(self._optimizer, updated)
        self._memory.rehome(self._optimizer, self._masters.compute_of)
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Return the loss, with gradients that may be used; raise `_StepLeftOut` where they may not."""
        has_written = any(map(self._is_written, self._parameters()))
        if self._num_evaluations or not self._evaluates_first:  # perhaps through `.data`, which leaves no trace
            self._updates.write_back(self._optimizer, self._parameters())
        self._num_evaluations += 1
        self._grads.begin_step()
        try:
            with torch.enable_grad():
                loss = closure()
        except BaseException:
            self._updates.give_up()
            raise
        return self._check(loss, can_skip=not has_written)

    def _check(self, loss: Any, *, can_skip: bool = True) -> Any:
        self._grads.end_step()
        self._updates.prepare()
        with_grad = [parameter for parameter in self._parameters() if parameter.grad is not None]
        if not self._guard.accepts(self._optimizer, with_grad, can_skip=can_skip):
            raise _StepLeftOut(loss)
        return loss

    def _is_written(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has been written to since the step began."""
        return self._versions.get(id(parameter)) != parameter._version

    def _updated(self) -> list[torch.Tensor]:
        """Return the parameters that the optimizer has written to, or may have through ``.data``."""
        if not self._evaluates_first:
            return self._parameters()
        return [p for p in self._parameters() if p.grad is not None or self._is_written(p)]

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in plain(group["params"])]

    def remove(self) -> None:
        """Give the optimizer the `step` back that it had."""
        if self._previous is None:
            self._optimizer.__dict__.pop("step", None)
        else:
            self._optimizer.step = self._previous  # type: ignore[method-assign]


def evaluates_first(optimizer: Optimizer) -> bool:
    """Whether the optimizer's `step` is torch's own or ours: it evaluates its closure before it touches anything."""
    owner = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
    return owner.__module__.startswith(("torch.optim.", "lightning_cxl."))


def _bring_to_host(optimizer: Optimizer) -> None:
    """Give a fused optimizer of torch what a loss scaler on a device has told it: it would not wait for a copy."""
    for name in ("grad_scale", "found_inf"):
        value = vars(optimizer).get(name)
        if isinstance(value, torch.Tensor):
            setattr(optimizer, name, value.cpu())


class _StepLeftOut(Exception):
    """Ends a step: its gradients may not be used."""

    def __init__(self, loss: Any) -> None:
        super().__init__("the gradients of this step are not finite")
        self.loss = loss
