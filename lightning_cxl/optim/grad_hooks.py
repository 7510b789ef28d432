"""Hooks around autograd's accumulation into one leaf parameter."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter


class GradientHooks:
    """Calls `received` whenever autograd has finished accumulating into `parameter`."""

    def __init__(self, parameter: Parameter, received: Callable[[], None]) -> None:
        was_trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # autograd accepts hooks on trainable tensors only
        self._received = received
        self._before: Callable[[], None] | None = None
        self._node: Any = torch.autograd.graph.get_gradient_edge(parameter).node  # lives as long as somebody holds it
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._after_hook)  # type: ignore[no-untyped-call]
        ]
        parameter.requires_grad_(was_trainable)

    def before_accumulation(self, call: Callable[[], None]) -> None:
        """Call this just before autograd adds to ``.grad``; not for gradients that `torch.autograd.grad` returns."""
        self._before = call
        self._handles.append(self._node.register_prehook(self._before_hook))

    def remove(self) -> None:
        """Call nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._node = None

    def _before_hook(self, _grads: tuple[torch.Tensor, ...]) -> None:
        assert self._before is not None
        with torch.no_grad():
            self._before()

    def _after_hook(self, _parameter: torch.Tensor) -> None:
        with torch.no_grad():
            self._received()
