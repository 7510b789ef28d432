"""`DeferredLogits`: logits that are not made yet, and what a model does with each of them.

[Note: Deferred logits]
Between the output layer of a model of transformers and its loss lie a few lines that differ from model to model: Gemma
caps logits, Granite divides and Cohere multiplies them by a number, others turn them into float32. While
`chunked_loss` is on, the output layer returns `DeferredLogits`. Operations that treat every logit by itself, with
numbers alone, are noted; `chunked_cross_entropy` does them chunk by chunk. Any other operation, of the model or of
whoever reads ``output.logits``, gets logits that are made then, all of them: right, but as large as ever.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cxl.torch_private import plain_tensor_functions, tree_map, wrapper_tensor

log = logging.getLogger("lightning_cxl")
_EACH_BY_ITSELF = frozenset({"mul", "div", "true_divide", "tanh", "float", "to", "contiguous"})
_SAME = {"__mul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__div__": "div"}
_ABOUT_IT = frozenset({"size", "dim", "numel", "element_size", "is_floating_point", "__len__", "__get__", "ndimension"})
_FIELDS = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cpu", "is_cuda", "requires_grad"})
_told: set[str] = set()

Step = Callable[[Tensor], Tensor]


class DeferredLogits(Tensor):
    """Stands for logits ``(..., vocabulary)``. See [Note: Deferred logits]."""

    layer: nn.Module
    forward_of_layer: Callable[[Tensor], Tensor]
    hidden: Tensor
    steps: tuple[Step, ...]

    @staticmethod
    def __new__(
        cls,
        layer: nn.Module,
        forward: Callable[[Tensor], Tensor],
        hidden: Tensor,
        vocabulary: int,
        steps: tuple[Step, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> "DeferredLogits":
        """Defer ``forward(hidden)``.

        Args:
            cls: this class.
            layer: the output layer.
            forward: its forward.
            hidden: ``(..., width)``.
            vocabulary: how many logits a token has.
            steps: what comes after `forward`.
            dtype: of the result; None: what a linear layer makes of `hidden`.
        """
        kind = hidden.device.type
        if dtype is None:
            is_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if is_autocast else hidden.dtype
        self: DeferredLogits = wrapper_tensor(cls, (*hidden.shape[:-1], vocabulary), dtype, hidden.device)
        self.layer, self.forward_of_layer, self.hidden, self.steps = layer, forward, hidden, steps
        return self

    def made(self, operation: str) -> Tensor:
        """Return all logits; says once that and why they are made, where they are to be differentiated."""
        if torch.is_grad_enabled() and operation not in _told:
            _told.add(operation)
            log.info("All logits are made at once: `%s` asks for them, which cannot be done in chunks.", operation)
        return self.scored(self.forward_of_layer(self.hidden))

    def scored(self, logits: Tensor) -> Tensor:
        """Return what the steps make of some logits."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def _then(self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "DeferredLogits":
        dtype = function(torch.empty(0, dtype=self.dtype), *args, **kwargs).dtype

        def step(logits: Tensor) -> Tensor:
            return function(logits, *args, **kwargs)

        steps = (*self.steps, step)
        return DeferredLogits(self.layer, self.forward_of_layer, self.hidden, self.shape[-1], steps, dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what is done with every logit by itself; make the logits for anything else."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _ABOUT_IT and (name != "__get__" or func.__self__.__name__ in _FIELDS):
            with plain_tensor_functions():
                return func(*args, **kwargs)
        if _SAME.get(name, name) in _EACH_BY_ITSELF and isinstance(args[0], cls) and _are_numbers(*args[1:], kwargs):
            return args[0]._then(func, args[1:], kwargs)
        named = func.__self__.__name__ if name == "__get__" else name
        args, kwargs = tree_map(lambda each: each.made(named) if isinstance(each, cls) else each, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as torch's own tests have it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make the logits for what comes here without a torch function, such as code in C++."""
        args, kwargs = tree_map(
            lambda each: each.made(str(func)) if isinstance(each, cls) else each, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _are_numbers(*values: Any) -> bool:
    """Return whether no value is a tensor or a device: what is done then is the same for every logit."""
    flat = [each for value in values for each in (value.values() if isinstance(value, dict) else (value,))]
    return all(isinstance(each, (bool, int, float, torch.dtype)) for each in flat)
