"""Hooks around autograd's accumulation into one leaf parameter.

[Note: Which hooks stay]
Autograd's node of a leaf is made anew whenever the leaf's data changes its device, and hooks on the old node are lost.
Hooks on the tensor itself stay, but those before the accumulation also run when `torch.autograd.grad` asks for the
leaf's gradient. So a parameter that stays where it is has its first hook on the node, others have both on the tensor.

The gradient of such another parameter may come while it is not where it was used: that of a bias that is added last
needs nothing that is recomputed, so it comes before the unit is entered. Autograd takes it as it is, but copies one
that others hold as well, such as the gradient of the output itself, to where the parameter is then. So the hook before
gives it one of its own.

Torch keeps hooks where the garbage collector does not look. So what they reach must not reach the model, or a training
that nobody ends would never be found ([Note: Call order in a user's loop]).
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter

from lightning_cxl.torch_private import hooks_after_accumulation


class GradientHooks:
    """Calls `received` whenever autograd has finished accumulating into `parameter`.

    Args:
        parameter: a leaf.
        received: called before hooks that the user has put on the parameter so far where it `stays`, else after all.
        before: called just before autograd adds to ``.grad``; where the parameter does not stay, also for gradients
            that `torch.autograd.grad` returns.
        stays: whether the parameter never changes its device. See [Note: Which hooks stay].
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
        self._stays = stays
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

    def remove(self) -> None:
        """Remove the hooks from the parameter."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._node = None

    def _before_hook(self, grad: torch.Tensor) -> torch.Tensor | None:
        self._hooks[self._key] = self._hooks.pop(self._key)  # after those that have come since
        with torch.no_grad():
            if self._before is not None:
                self._before()
            return _of_its_own(grad, self._parameter()) if not grad.requires_grad else None

    def _before_node(self, _grads: tuple[torch.Tensor, ...]) -> None:
        assert self._before is not None
        with torch.no_grad():
            self._before()

    def _after_hook(self, _parameter: torch.Tensor) -> None:
        with torch.no_grad():
            self._received()


def _of_its_own(grad: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Return a copy that autograd keeps as it is, of a gradient that is not where the parameter is; else None."""
    if parameter is None or grad.device == parameter.device or grad.layout is not torch.strided:
        return None
    copy = torch.empty_strided(parameter.shape, parameter.stride(), dtype=grad.dtype, device=grad.device)
    return copy.copy_(grad)
