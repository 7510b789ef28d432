"""Hooks around autograd's accumulation into one leaf parameter."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter


class GradientHooks:
    """Calls `received` whenever autograd has finished accumulating into `parameter`.

    Args:
        parameter: a leaf.
        received: called before hooks that the user has put on the parameter so far where `first`, else after all hooks.
        before: called just before autograd adds to ``.grad``; not for gradients that `torch.autograd.grad` returns.
        first: see `received`.
    """

    def __init__(
        self,
        parameter: Parameter,
        received: Callable[[], None],
        before: Callable[[], None] | None = None,
        *,
        first: bool = False,
    ) -> None:
        was_trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # autograd accepts hooks on trainable tensors only
        self._received = received
        self._before = before
        self._node: Any = torch.autograd.graph.get_gradient_edge(parameter).node  # lives as long as somebody holds it
        self._handles: list[Any] = []
        if not first:
            self._handles.append(self._node.register_hook(self._after_node))  # runs when all hooks of the tensor have
        else:
            handle = parameter.register_post_accumulate_grad_hook(self._after_hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
            hooks: Any = parameter._post_accumulate_grad_hooks
            others = [(key, hook) for key, hook in hooks.items() if key != handle.id]
            for key, hook in others:  # to the end, in their order
                del hooks[key]
                hooks[key] = hook
        if before is not None:
            self._handles.append(self._node.register_prehook(self._before_hook))
        parameter.requires_grad_(was_trainable)

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

    def _after_node(self, _inputs: tuple[torch.Tensor, ...], _outputs: tuple[torch.Tensor, ...]) -> None:
        with torch.no_grad():
            self._received()

    def _after_hook(self, _parameter: torch.Tensor) -> None:
        with torch.no_grad():
            self._received()
