"""`chunked_cross_entropy`: the loss of an output layer, from its inputs, a few tokens' logits at a time.

[Note: Loss in chunks]
The logits of all tokens, their softmax and its gradient are the largest tensors of a language model with a large
vocabulary. Nobody needs them at once: the loss is a sum over tokens, and so is the gradient of the layer's weight.

* The layer is a plain `nn.Linear`: the forward makes the logits of a chunk, its part of the loss, and at once the
  gradients of that part, so no logits are made twice. A token's row of the gradient of the inputs is written to its
  place. The gradient of the weight is added up in float32 and rounded to the weight's type once, as one product over
  all tokens would be. The backward has only to multiply by the gradient of the loss.
* Any other layer (with adapters, quantised, streamed, or in float16, whose gradients need the loss scale before they
  are rounded): each chunk is checkpointed, so autograd makes its logits again in the backward.

Tokens without a label take no part: their logits are not made.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""The label of a token that nobody predicts, as torch and transformers have it."""
_FEWEST_TOKENS, _MOST_TOKENS = 256, 1024
_BAND_ROWS = 8192

Scores = Callable[[Tensor], Tensor]
"""What is done with each logit before the loss, such as a scale or a cap: of any shape, float32 in the end."""


def chunk_tokens(width: int) -> int:
    """Return how many tokens' logits are made at a time, for inputs of `width` numbers.

    A quarter of the width: the logits then take about as much memory as the weight of the layer, whatever the
    vocabulary. At least 256, so that products are large enough to be fast; at most 1024, which is enough for that.
    """
    return min(max(width // 4, _FEWEST_TOKENS), _MOST_TOKENS)


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

    Args:
        hidden: ``(tokens, width)``, the layer's inputs.
        labels: ``(tokens,)`` of int64; `IGNORED` for none.
        num_items: what the sum is divided by; None: the number of labels.
    """
    # without values, or where a compiler wants fixed shapes, nobody can say which tokens have labels
    trained = torch.arange(len(labels), device=labels.device) if labels.is_meta else (labels != IGNORED).nonzero()[:, 0]
    count = len(trained) if num_items is None else num_items
    if isinstance(count, Tensor):
        count = count.to(hidden.device)
    if _is_plain(forward, layer) and torch.float16 not in (compute_type(hidden), layer.weight.dtype):
        differentiate = torch.is_grad_enabled()
        plain: Any = _PlainLayer.apply
        loss: Tensor = plain(hidden, layer.weight, layer.bias, labels, trained, scores, count, tokens, differentiate)
        return loss
    hidden, labels = hidden[trained], labels[trained]
    total = hidden.new_zeros((), dtype=torch.float32)
    for part, targets in zip(torch.split(hidden, tokens), torch.split(labels, tokens), strict=True):
        total = total + checkpoint(_sum_of, forward, scores, part, targets, use_reentrant=False)
    return total / count


def _is_plain(forward: Callable[[Tensor], Tensor], layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether this is torch's own linear layer, with a weight that is no tensor of another class."""
    is_own = getattr(forward, "__func__", None) is nn.Linear.forward
    return is_own and isinstance(layer, nn.Linear) and type(layer.weight.detach()) is Tensor


def _sum_of(forward: Callable[[Tensor], Tensor], scores: Scores | None, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = forward(hidden)
    return functional.cross_entropy((scores(logits) if scores else logits).float(), labels, reduction="sum")


def is_autocast(kind: str) -> bool:
    """Return whether torch chooses types on devices of this kind."""
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
        compute, kind = compute_type(hidden), hidden.device.type
        casts = is_autocast(kind)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for_hidden = torch.zeros_like(hidden) if wanted[0] else None
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        with torch.autocast(kind, enabled=False) if casts else contextlib.nullcontext():
            # one cast here, as autocast keeps one; its own would be without a gradient, for others to find
            matrix = weight.to(compute) if casts else weight
            offset = None if bias is None else bias.to(matrix.dtype)
            for rows in torch.split(trained, tokens):
                part = hidden[rows].to(compute)
                logits = functional.linear(part, matrix, offset)
                summed, gradient = _of_chunk(logits, labels[rows, None], scores, count if any(wanted) else None)
                total += summed
                del logits
                if gradient is None:
                    continue
                if for_hidden is not None:
                    for_hidden[rows] = torch.mm(gradient, matrix).to(hidden.dtype)
                if for_weight is not None:
                    _add_product(for_weight, gradient, part)
                if for_bias is not None:
                    for_bias += gradient.sum(0, dtype=torch.float32)
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


def _of_chunk(
    logits: Tensor, labels: Tensor, scores: Scores | None, count: Tensor | int | None
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of a chunk's losses, and the gradient of the logits of ``sum / count``; None without `count`.

    Args:
        logits: ``(tokens, vocabulary)``.
        labels: ``(tokens, 1)``.
    """
    if scores is not None:
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            scored = scores(logits)
    else:
        scored = logits
    result = torch.log_softmax(scored.detach(), -1, dtype=torch.float32)
    summed = -result.gather(1, labels).sum()
    if count is None:
        return summed, None
    result.exp_()
    result.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=torch.float32))
    result.div_(count)
    if scores is None:
        return summed, result.to(logits.dtype)
    (gradient,) = torch.autograd.grad(scored, logits, result.to(scored.dtype))
    return summed, gradient


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add ``one.T @ other`` to `total`, without a second tensor of its size."""
    if total.dtype == one.dtype == other.dtype:
        torch.addmm(total, one.T, other, out=total)
        return
    for band, columns in zip(torch.split(total, _BAND_ROWS), torch.split(one, _BAND_ROWS, dim=1), strict=True):
        band += columns.T @ other
