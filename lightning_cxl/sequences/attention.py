"""`packed_arguments`: what a model of transformers is given so that packed sequences do not attend to each other.

[Note: Boundaries of packed sequences]
Models of transformers keep packed sequences apart in their own ways, which depend on how they attend:

* eager, sdpa and flex attention: the model makes a block-diagonal mask where positions begin anew, for each row of a
  batch. It looks for that only where it is given no ``attention_mask`` and no cache.
* flash attention: the kernel is told where sequences begin. The model finds that out from positions for a batch of one
  row only; in larger batches sequences would attend to each other. So it is told, for all rows together.

A state that runs over the whole row, such as Mamba's, cannot be cut so; and some models make a mask of their own, in
which positions do not count. So the model is asked: two short sequences, in one row, go into its forward, which ends
when it reaches the first block. What the block would be given must keep them apart. No weight of a block is touched.
"""

import inspect
import logging
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_cxl.sequences.cross_entropy import IGNORED
from lightning_cxl.sequences.packing import lengths_of
from lightning_cxl.streaming.units import find_units
from lightning_cxl.torch_private import tree_leaves

log = logging.getLogger("lightning_cxl")
_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_QUESTION = (0, 1, 2, 0, 1, 2, 3)
"""Positions of the row that a model is asked about."""
_BEGINS = 3
"""Where its second sequence begins: a token that sees nothing but itself, in any window."""
_FORBIDDEN = -1e4
_told: set[str] = set()
_answers: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str | None]] = weakref.WeakKeyDictionary()


def why_not_apart(model: nn.Module) -> str | None:
    """Return why packed sequences cannot be kept apart in `model`; None where they can.

    Args:
        model: of transformers, with weights that its forward can use. See [Note: Boundaries of packed sequences].
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        return "it is no model of transformers"
    config = config.get_text_config()
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(each.name == "position_ids" or each.kind is each.VAR_KEYWORD for each in parameters):
        return "it takes no position_ids"
    if getattr(model, "_is_stateful", False) or not set(getattr(config, "layer_types", None) or ()) <= _KINDS:
        return "it has layers with a state that runs over the whole row"
    asked_for, answer = _answers.get(model, (None, None))
    if asked_for != config._attn_implementation:
        answer = _ask(model, config._attn_implementation)
        _answers[model] = config._attn_implementation, answer
    return answer


class _ReachedError(Exception):
    """The forward of a model has reached the first block, with these arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args, kwargs


def _ask(model: nn.Module, implementation: str) -> str | None:
    """Let the model's forward run as far as its first block; see whether that would keep sequences apart."""
    units = find_units(model)
    if not units:
        return "it has no repeated blocks, whose mask could be looked at"

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _ReachedError(args, kwargs)

    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    positions = torch.tensor([_QUESTION], device=device)
    others = [] if device.type == "cpu" else [device]
    handle = units[0][1].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad(), torch.random.fork_rng(others, device_type=device.type):  # embeddings may drop some
            model(input_ids=torch.zeros_like(positions), use_cache=False, **_arguments(implementation, positions))
    except _ReachedError as reached:
        given = tree_leaves(reached.arguments)
        if _is_flash(implementation):
            is_told = reached.arguments[1].get("cu_seq_lens_q") is not None
            return None if is_told else "its blocks are not told where sequences begin"
        return None if any(map(_is_cut, given)) else "its mask lets them attend to each other"
    finally:
        handle.remove()
    return "its forward does not call its blocks"


def _is_cut(given: Any) -> bool:
    """Return whether this is a mask in which the second sequence of the question begins anew."""
    if isinstance(given, Tensor):
        if given.dim() != 4 or given.shape[-2:] != (len(_QUESTION), len(_QUESTION)):
            return False
        row = given[..., _BEGINS, : _BEGINS + 1]
        seen = row if row.dtype is torch.bool else row > _FORBIDDEN
        return bool(seen[..., _BEGINS].all() and not seen[..., :_BEGINS].any())  # some masks say what is not seen
    rule = getattr(given, "mask_mod", None)  # of flex attention
    return rule is not None and [_sees(rule, key) for key in range(_BEGINS + 1)] == [False] * _BEGINS + [True]


def _sees(rule: Any, key: int) -> bool:
    return bool(rule(*(torch.tensor(index) for index in (0, 0, _BEGINS, key))))


def packed_arguments(model: nn.Module, position_ids: Tensor) -> dict[str, Any] | None:
    """Return what the forward of `model` is given for packed rows, besides ``input_ids`` and ``use_cache=False``.

    See [Note: Boundaries of packed sequences].

    Args:
        model: a causal language model of transformers.
        position_ids: int64 ``(rows, tokens)``, which begin at 0 with each sequence; see [Note: Packed rows].

    Returns:
        Keyword arguments. None where `model` would let sequences attend to each other; a line in the log says why.
    """
    why = why_not_apart(model)
    if why is not None:
        text = f"{type(model).__name__} cannot keep packed sequences apart: {why}. Each gets a row of its own."
        if text not in _told:
            _told.add(text)
            log.info(text)
        return None
    config: Any = model.config
    return _arguments(config.get_text_config()._attn_implementation, position_ids)


def _arguments(implementation: str, position_ids: Tensor) -> dict[str, Any]:
    arguments: dict[str, Any] = {"position_ids": position_ids}
    if _is_flash(implementation):
        lengths = lengths_of(position_ids)
        ends = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        longest = int(lengths.max())
        arguments |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return arguments


def separate(input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``input_ids`` and ``labels`` with a row for each packed sequence that has labels, padded at the end."""
    lengths = lengths_of(position_ids).tolist()
    pieces = zip(torch.split(input_ids.flatten(), lengths), torch.split(labels.flatten(), lengths), strict=True)
    kept = [(ids, own) for ids, own in pieces if bool((own[1:] != IGNORED).any())] or [(input_ids[0], labels[0])]
    ids, own = ([pair[which] for pair in kept] for which in (0, 1))
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return padded, nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=IGNORED)


def _is_flash(implementation: str) -> bool:
    return "flash" in implementation
