"""`chunked_loss`: a causal language model of transformers computes its loss without ever holding all logits."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_cxl.errors import ConfigError
from lightning_cxl.sequences.cross_entropy import IGNORED, chunk_tokens, chunked_cross_entropy
from lightning_cxl.sequences.deferred_logits import DeferredLogits
from lightning_cxl.streaming.stand_in import Compiler, StandIn, call_under
from lightning_cxl.torch_private import has_backward_hooks

log = logging.getLogger("lightning_cxl")
_told: set[str] = set()


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
        _tell(f"{type(model).__name__} computes its loss from all logits at once: {why}.")
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


def _tell(text: str) -> None:
    if text not in _told:
        _told.add(text)
        log.info(text)


class _DeferringHead(StandIn):
    """Stands in for the forward of the output layer, and makes no logits yet."""

    stays_outside = True  # a layer that is streamed must be there when its logits are made, not when they are deferred

    def run(self, compiler: Compiler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Defer the layer; what is compiled as a whole, or hooked in its backward, computes as ever."""
        if compiler is not None or has_backward_hooks(self.module) or kwargs or len(args) != 1:
            _tell(
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

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._original,)


def _itself(value: Any) -> Any:
    return value
