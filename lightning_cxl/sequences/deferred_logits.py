"""`DeferredLogits`: logits that are not made yet, and what a model does with each of them.

[Note: Deferred logits]
Between the output layer of a model of transformers and its loss lie a few lines that differ from model to model: Gemma
caps logits, Granite divides and Cohere multiplies them by a number, others turn them into float32. While
`chunked_loss` is on, the output layer returns `DeferredLogits`. Operations that treat every logit by itself, with
numbers alone, are noted; `chunked_cross_entropy` does them chunk by chunk. Any other operation, of the model or of
whoever reads ``output.logits``, gets logits that are made then, all of them: right, but as large as ever.

What is made is kept, and is what the logits are from then on, also for the loss: somebody may have written to it, or
waits for its gradient. It is made with gradients and autocast as they were when the layer was called, and with the
weights of then: once they have changed, it is an error to ask for it.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cxl.sequences.cross_entropy import compute_type
from lightning_cxl.streaming.saved_inputs import version_of
from lightning_cxl.torch_private import plain_tensor_functions, tree_map, wrapper_tensor

log = logging.getLogger("lightning_cxl")
_EACH_BY_ITSELF = frozenset({"mul", "div", "true_divide", "tanh", "float", "to", "contiguous"})
_SAME = {"__mul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__div__": "div"}
_MAY_CHANGE_NOTHING = frozenset({"float", "to", "contiguous"})
_ABOUT_IT = frozenset({"size", "dim", "numel", "element_size", "is_floating_point", "__len__", "__get__", "ndimension"})
_FIELDS = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cpu", "is_cuda"})
_told: set[str] = set()

Step = Callable[[Tensor], Tensor]


class DeferredLogits(Tensor):
    """Stands for logits ``(..., vocabulary)``. See [Note: Deferred logits]."""

    layer: nn.Module
    forward_of_layer: Callable[[Tensor], Tensor]
    hidden: Tensor
    steps: tuple[Step, ...]
    all_logits: Tensor | None
    """What `made` has made."""
    _autocast: tuple[torch.dtype, bool] | None
    _has_grad: bool
    _versions: list[int | None]

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
            hidden: ``(..., width)``.
            dtype: of the result; None: what a linear layer makes of `hidden`.
        """
        kind = hidden.device.type
        has_autocast = kind != "meta"  # torch has none for that device
        autocast = (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) if has_autocast else None
        if dtype is None:
            dtype = compute_type(hidden)
        self: DeferredLogits = wrapper_tensor(cls, (*hidden.shape[:-1], vocabulary), dtype, hidden.device)
        self.layer, self.forward_of_layer, self.hidden, self.steps = layer, forward, hidden, steps
        self.all_logits = None
        self._autocast, self._has_grad = autocast, torch.is_grad_enabled()
        self._versions = [version_of(parameter) for parameter in layer.parameters()]
        return self

    def as_deferred(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        dtype, enabled = self._autocast
        return torch.autocast(self.hidden.device.type, dtype, enabled=enabled)

    def made(self, operation: str) -> Tensor:
        """Return all logits; says once that and why they are made, where they are to be differentiated."""
        if self.all_logits is not None:
            return self.all_logits
        if [version_of(parameter) for parameter in self.layer.parameters()] != self._versions:
            raise RuntimeError(
                f"`{operation}` asks for logits that a chunked loss has not made, and the weights of the output layer "
                "have changed since the forward, for instance in an optimizer's step. Read the logits before that"
            )
        if self._has_grad and torch.is_grad_enabled() and operation not in _told:
            _told.add(operation)
            log.info("All logits are made at once: `%s` asks for them, which cannot be done in chunks.", operation)
        with torch.set_grad_enabled(self._has_grad), self.as_deferred():
            self.all_logits = self.scored(self.forward_of_layer(self.hidden))
        return self.all_logits

    def scored(self, logits: Tensor) -> Tensor:
        for step in self.steps:
            logits = step(logits)
        return logits

    def _carries_gradient(self) -> bool:
        carries = any(each.requires_grad for each in (self.hidden, *self.layer.parameters()))
        return self._has_grad and carries

    def _then(self, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "DeferredLogits":
        dtype = function(torch.empty(0, dtype=self.dtype), *args, **kwargs).dtype
        copies = True in (*args, *kwargs.values())
        if function.__name__ in _MAY_CHANGE_NOTHING and dtype == self.dtype and not copies:
            return self

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
        named = func.__self__.__name__ if name in ("__get__", "__set__") else name
        logits = args[0] if args and isinstance(args[0], cls) and args[0].all_logits is None else None
        if logits is not None and name == "__get__" and named == "requires_grad":
            return logits._carries_gradient()
        if logits is not None and _SAME.get(name, name) in _EACH_BY_ITSELF and _are_numbers(*args[1:], kwargs):
            return logits._then(func, args[1:], kwargs)
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
