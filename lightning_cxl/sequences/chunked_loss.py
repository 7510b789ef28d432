"""`chunked_loss`: a causal language model of transformers computes its loss without ever holding all logits."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_cxl.errors import ConfigError
from lightning_cxl.streaming.replay import version_of
from lightning_cxl.streaming.units import Compiler, StandIn, call_under
from lightning_cxl.torch_private import has_backward_hooks, plain_tensor_functions, tree_map, wrapper_tensor

log = logging.getLogger("lightning_cxl")


@functools.cache
def tell_once(text: str) -> None:
    """Write a line to the log, unless it has been written before."""
    log.info(text)


# `chunked_cross_entropy`: the loss of an output layer, from its inputs, a few tokens' logits at a time.
#
# [Note: Loss in chunks]
# The logits of all tokens, their softmax and its gradient are the largest tensors of a language model with a large
# vocabulary. They are not needed at once: the loss is a sum over tokens, and so is the gradient of the layer's weight.
#
# * The layer is a plain `nn.Linear`: the forward makes the logits of a chunk, its part of the loss, and at once its
#   part of the gradients. A token's row of the gradient of the inputs is written to its place. The gradient of the
#   weight is added up in float32, but that of a bfloat16 weight has half of these bytes: after all chunks, logits are
#   made again, for all tokens those of a band of the vocabulary, and the band of the gradient is one product, as
#   without chunks. The backward has only to multiply by the gradient of the loss.
# * Any other layer (with adapters, quantised, streamed, or in float16, whose gradients need the loss scale before they
#   are rounded): each chunk is checkpointed, so autograd makes its logits again in the backward.
#
# Tokens without a label take no part: their logits are not made.

IGNORED = -100  # the label of a token that is not predicted, as torch and transformers have it
_BAND_ROWS = 8192

Scores = Callable[[Tensor], Tensor]
"""Treats each logit by itself, before the loss, such as a scale or a cap: of any shape."""


def chunk_tokens(width: int) -> int:
    """Return how many tokens' logits are made at a time, for inputs of `width` numbers."""
    # a quarter of the width: the logits then take about as much memory as the layer's weight, whatever the vocabulary.
    # Products of 256 tokens are large enough to be fast, of 1024 as fast as they get
    return min(max(width // 4, 256), 1024)


def chunked_cross_entropy(
    forward: Callable[[Tensor], Tensor],
    layer: nn.Module,
    scores: Scores | None,
    hidden: Tensor,
    labels: Tensor,
    num_items: Tensor | int | None,
    tokens: int,
) -> Tensor:
    """Return the cross-entropy of all tokens with a label. See [Note: Loss in chunks].

    `hidden` is ``(tokens, width)``, `labels` ``(tokens,)`` of int64. The sum is divided by `num_items`, or the number
    of labels.
    """
    # without values, or where a compiler wants fixed shapes, the tokens with labels are not known
    trained = torch.arange(len(labels), device=labels.device) if labels.is_meta else (labels != IGNORED).nonzero()[:, 0]
    count = len(trained) if num_items is None else num_items
    if isinstance(count, Tensor):
        count = count.to(hidden.device)
    # torch's own linear layer, with a weight that is no tensor of another class
    is_own = getattr(forward, "__func__", None) is nn.Linear.forward
    if (
        is_own
        and isinstance(layer, nn.Linear)
        and type(layer.weight.detach()) is Tensor
        and torch.float16 not in (compute_type(hidden), layer.weight.dtype)
    ):
        differentiate = torch.is_grad_enabled()
        plain: Callable[..., Tensor] = _PlainLayer.apply
        return plain(hidden, layer.weight, layer.bias, labels, trained, scores, count, tokens, differentiate)

    def sum_of(part: Tensor, targets: Tensor) -> Tensor:
        logits = forward(part)
        return functional.cross_entropy((scores(logits) if scores else logits).float(), targets, reduction="sum")

    hidden, labels = hidden[trained], labels[trained]
    total = hidden.new_zeros((), dtype=torch.float32)
    for part, targets in zip(torch.split(hidden, tokens), torch.split(labels, tokens), strict=True):
        total = total + checkpoint(sum_of, part, targets, use_reentrant=False)
    return total / count


def is_autocast(kind: str) -> bool:
    return kind != "meta" and torch.is_autocast_enabled(kind)  # torch has none for that device


def compute_type(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    chosen = is_autocast(kind) and hidden.dtype != torch.float64  # which autocast leaves alone
    return torch.get_autocast_dtype(kind) if chosen else hidden.dtype


class _PlainLayer(torch.autograd.Function):
    """The loss of a plain linear layer, and its gradients, made in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        trained: Tensor,
        scores: Scores | None,
        count: Tensor | int,
        tokens: int,
        differentiate: bool,
    ) -> Tensor:
        wanted = [differentiate and needed for needed in ctx.needs_input_grad[:3]]
        in_bands = wanted[1] and weight.dtype is torch.bfloat16
        wanted[1] &= not in_bands  # of the chunks
        compute, kind, casts = compute_type(hidden), hidden.device.type, is_autocast(hidden.device.type)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for_hidden = torch.zeros_like(hidden) if wanted[0] else None
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        sums = []  # of each token, the logarithm of its sum of exponentials
        with torch.autocast(kind, enabled=False) if casts else contextlib.nullcontext():
            # one cast here, as autocast keeps one; its own would be without a gradient, for others to find
            matrix = weight.to(compute) if casts else weight
            offset = None if bias is None else bias.to(matrix.dtype)
            for rows in torch.split(trained, tokens):
                part, targets = hidden[rows].to(compute), labels[rows, None]
                logits = functional.linear(part, matrix, offset)
                scored = _scored(logits, scores, differentiate)
                result = torch.log_softmax(scored.detach(), -1, dtype=torch.float32)
                total -= result.gather(1, targets).sum()
                if in_bands:
                    sums.append(scored.detach().amax(1, keepdim=True).float() - result.amax(1, keepdim=True))
                gradient = _gradient(logits, scored, result, targets, count) if any(wanted) else None
                del logits, scored, result
                if gradient is None:
                    continue
                if for_hidden is not None:
                    for_hidden[rows] = torch.mm(gradient, matrix).to(hidden.dtype)
                if for_weight is not None and gradient.dtype == part.dtype == torch.float32:
                    torch.addmm(for_weight, gradient.T, part, out=for_weight)
                elif for_weight is not None:  # in bands, without a second tensor of its size
                    for start in range(0, len(matrix), _BAND_ROWS):
                        band = slice(start, start + _BAND_ROWS)
                        for_weight[band] += gradient[:, band].T @ part
                if for_bias is not None:
                    for_bias += gradient.sum(0, dtype=torch.float32)
                del gradient
            if in_bands:
                for_weight, part, targets = torch.empty_like(weight), hidden[trained].to(compute), labels[trained, None]
                log_sums = torch.cat(sums)
                # no more logits at a time than in a chunk, and rows that begin where products are fast
                width = min(_BAND_ROWS, max(tokens * len(matrix) // max(len(trained), 1) // 64, 1) * 64)
                for start in range(0, len(matrix), width):
                    band = slice(start, start + width)
                    logits = functional.linear(part, matrix[band], None if offset is None else offset[band])
                    scored = _scored(logits, scores, differentiate)
                    # a logit may be rounded otherwise than before: it is not above the sum for that
                    result = (scored.detach() - log_sums).clamp_(max=0)
                    gradient = _gradient(logits, scored, result, targets - start, count)
                    del logits, scored, result
                    for_weight[band] = gradient.T @ part
                    del gradient
        ctx.gradients = [
            for_hidden,
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None or bias is None else for_bias.to(bias.dtype),
        ]
        return total / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():  # torch's own check would not see this: `gradient` may be a constant
            raise RuntimeError(
                "the gradients of a chunked loss cannot be differentiated (create_graph=True): leave chunked_loss out"
            )
        gradients, ctx.gradients = ctx.gradients, None  # handed over: the engine may keep them without a copy
        if gradients is None:
            raise RuntimeError(
                "the gradients of a chunked loss are made once, in the forward, and a backward has used them up. Call "
                "the model again, or leave chunked_loss out for a loss that is differentiated twice"
            )
        return *(None if each is None else each.mul_(gradient) for each in gradients), *[None] * 6


def _scored(logits: Tensor, scores: Scores | None, differentiate: bool) -> Tensor:
    if scores is None:
        return logits
    with torch.set_grad_enabled(differentiate):
        return scores(logits.requires_grad_(differentiate))


def _gradient(logits: Tensor, scored: Tensor, log_softmax: Tensor, labels: Tensor, count: Tensor | int) -> Tensor:
    """Return the gradient of the logits of ``sum / count``; `labels` count from their first column."""
    result, last = log_softmax.exp_(), logits.shape[1] - 1  # in its memory
    result.scatter_add_(1, labels.clamp(0, last), -((labels >= 0) & (labels <= last)).float()).div_(count)
    if scored is logits:
        return result.to(logits.dtype)
    (gradient,) = torch.autograd.grad(scored, logits, result.to(scored.dtype))
    return gradient


# `DeferredLogits`: logits that are not made yet, and what a model does with each of them.
#
# [Note: Deferred logits]
# Between the output layer of a model of transformers and its loss lie a few lines that differ from model to model:
# Gemma caps logits, Granite divides and Cohere multiplies them by a number, others turn them into float32. While
# `chunked_loss` is on, the output layer returns `DeferredLogits`. Operations that treat every logit by itself, with
# numbers alone, are noted; `chunked_cross_entropy` does them chunk by chunk. Any other operation, of the model or of
# whoever reads ``output.logits``, gets logits that are made then, all of them: right, but as large as ever.
#
# Made logits are kept and stay the logits from then on, also for the loss: code may have written to them, or wait for
# their gradient. They are made with gradients and autocast as they were when the layer was called, and with the weights
# of that time: once these have changed, it is an error to ask for logits.

_EACH_BY_ITSELF = frozenset({"mul", "div", "true_divide", "tanh", "float", "to", "contiguous"})
_SAME = {"__mul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__div__": "div"}
_MAY_CHANGE_NOTHING = frozenset({"float", "to", "contiguous"})

_FIELDS = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cpu", "is_cuda"})
_METHODS = frozenset({"size", "dim", "numel", "element_size", "is_floating_point", "__len__", "ndimension"})
"""That need no logits."""


class DeferredLogits(Tensor):
    """Stands for logits ``(..., vocabulary)``. See [Note: Deferred logits]."""

    layer: nn.Module
    forward_of_layer: Callable[[Tensor], Tensor]
    hidden: Tensor
    steps: tuple[Scores, ...]
    all_logits: Tensor | None  # that `made` has made
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
        steps: tuple[Scores, ...] = (),
        dtype: torch.dtype | None = None,
    ) -> "DeferredLogits":
        """Defer ``forward(hidden)``, of `dtype`; None: of that which a linear layer makes of `hidden`."""
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
        if self._has_grad and torch.is_grad_enabled():
            tell_once(f"All logits are made at once: `{operation}` asks for them, which cannot be done in chunks.")
        with torch.set_grad_enabled(self._has_grad), self.as_deferred():
            self.all_logits = self.scored(self.forward_of_layer(self.hidden))
        return self.all_logits

    def scored(self, logits: Tensor) -> Tensor:
        for step in self.steps:
            logits = step(logits)
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        is_attribute = name in ("__get__", "__set__")
        named = func.__self__.__name__ if is_attribute else name
        if name in _METHODS or (name == "__get__" and named in _FIELDS):
            with plain_tensor_functions():
                return func(*args, **kwargs)
        answer = cls._noted(func, f".{named}" if is_attribute else name, args, kwargs)
        return cls._with_logits(func, named, args, kwargs) if answer is NotImplemented else answer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as torch's own tests have it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # what comes here without a torch function, such as from code in C++
        return cls._with_logits(func, str(func), args, kwargs or {})

    @classmethod
    def _with_logits(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda each: each.made(name) if isinstance(each, cls) else each, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def _noted(cls, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return deferred logits after an operation; `NotImplemented` where it needs logits."""
        if not args or not isinstance(args[0], cls) or args[0].all_logits is not None:
            return NotImplemented
        logits, args = args[0], args[1:]
        if name == ".requires_grad" and func.__name__ == "__get__":
            parameters = logits.layer.parameters()
            return logits._has_grad and any(each.requires_grad for each in (logits.hidden, *parameters))
        given = (*args, *kwargs.values())
        # without a tensor or a device among them, the same is done for every logit
        are_numbers = all(isinstance(each, (bool, int, float, torch.dtype)) for each in given)
        if _SAME.get(name, name) not in _EACH_BY_ITSELF or not are_numbers:
            return NotImplemented
        dtype = func(torch.empty(0, dtype=logits.dtype), *args, **kwargs).dtype
        if name in _MAY_CHANGE_NOTHING and dtype == logits.dtype and True not in given:  # copy=True
            return logits
        steps = (*logits.steps, lambda each: func(each, *args, **kwargs))
        return DeferredLogits(logits.layer, logits.forward_of_layer, logits.hidden, logits.shape[-1], steps, dtype)


@contextmanager
def chunked_loss(model: nn.Module, *, tokens: int | None = None) -> Iterator[None]:
    """Let `model` compute its loss in chunks inside: ``model(input_ids=..., labels=...).loss`` holds few logits.

    The loss and its gradients are those of the model's own forward, up to the order of summation. Scales and caps of
    logits, ``num_items_in_batch``, tokens without label, biases, tied or frozen weights, adapters and quantised layers
    are respected; see [Note: Loss in chunks] and [Note: Deferred logits]. ``output.logits`` can still be read, and is
    made when it is. A model that it cannot be done for computes as before, and a line in the log says so.

    Args:
        model: a causal language model of transformers, or a module that has one inside: a LightningModule, or one that
            PEFT has wrapped. Its forward is left alone; the backward may come after the context.
        tokens: whose logits are made at a time; None: 256 to 1024, by the width of the model.

    Raises:
        ConfigError: `tokens` is smaller than 1.
    """
    if tokens is not None and tokens < 1:
        raise ConfigError(f"tokens is the number of tokens whose logits are made at a time: at least 1, got {tokens}")
    found, why = _find(model)
    if found is None:
        tell_once(f"{type(model).__name__} computes its loss from all logits at once: {why}.")
    if found is None or isinstance(found[0].loss_function, _ChunkedLoss):  # on already, further out
        yield
        return
    owner, head = found
    own = owner.__dict__.get("_loss_function")
    deferring = _DeferringHead(head)
    owner.loss_function = _ChunkedLoss(owner.loss_function, tokens)
    try:
        yield
    finally:
        if own is None:
            del owner.__dict__["_loss_function"]
        else:
            owner.loss_function = own
        deferring.remove()


def _find(model: nn.Module) -> tuple[tuple[Any, nn.Module] | None, str]:
    """Return the model of transformers and its output layer; or None and why there is none."""
    from transformers import PreTrainedModel

    why = ""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            head: Any = module.get_output_embeddings()
            if isinstance(getattr(head, "out_features", None), int):
                return (module, head), ""
            kind = f"its output layer, {type(head).__name__}, is no linear one"
            why = why or ("it has no output embeddings" if head is None else kind)
    return None, why or "it holds no model of transformers"


class _DeferringHead(StandIn):
    """Stands in for the forward of the output layer, and makes no logits yet."""

    stays_outside = True  # a layer that is streamed must be there when its logits are made, not when they are deferred

    def run(self, compiler: Compiler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Defer the layer; what is compiled as a whole, or hooked in its backward, computes as ever."""
        if compiler is not None or has_backward_hooks(self.module) or kwargs or len(args) != 1:
            tell_once(
                f"{type(self.module).__name__} makes all logits at once: it is compiled together with its model, has "
                "backward hooks, or takes more than one argument."
            )
            return call_under(compiler, self.original, args, kwargs)
        size: int = self.module.out_features  # type: ignore[assignment]
        return DeferredLogits(self.module, self.original, args[0], size)


class _ChunkedLoss:
    """Stands in for the loss function of a model: `ForCausalLMLoss` of transformers, in chunks."""

    def __init__(self, original: Callable[..., Tensor], tokens: int | None) -> None:
        self._original = original
        self._tokens = tokens

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        is_known = self._original is ForCausalLMLoss and ignore_index == IGNORED and vocab_size == logits.shape[-1]
        fits = (labels if shift_labels is None else shift_labels).numel() == logits.shape[:-1].numel()
        if not isinstance(logits, DeferredLogits) or logits.all_logits is not None or not is_known or not fits:
            options = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            if shift_labels is not None:
                options["shift_labels"] = shift_labels
            return self._original(logits, labels, vocab_size, **options, **others)
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        hidden = logits.hidden.flatten(0, -2)
        with logits.as_deferred():
            return chunked_cross_entropy(
                logits.forward_of_layer,
                logits.layer,
                logits.scored if logits.steps else None,
                hidden,
                shift_labels.flatten().to(hidden.device, torch.long),
                num_items_in_batch,
                self._tokens or chunk_tokens(hidden.shape[-1]),
            )
