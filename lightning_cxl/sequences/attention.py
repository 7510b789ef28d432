"""`packed_arguments`: what a model of transformers is given so that packed sequences do not attend to each other.

[Note: Boundaries of packed sequences]
Models of transformers keep packed sequences apart in their own ways, which depend on how they attend:

* eager, sdpa and flex attention: the model makes a block-diagonal mask where positions begin anew, for each row of a
  batch. It looks for that only where it is given no ``attention_mask`` and no cache.
* sdpa attention needs no such mask where the model takes a `PackedMask`, see [Note: Attention document by document].
  Models that are compiled, or whose routers have a loss, which reads the mask, are not given one.
* flash attention: the kernel is told where sequences begin. The model finds that out from positions for a batch of one
  row only; in larger batches sequences would attend to each other. So it is told, for all rows together.

A state that runs over the whole row, such as Mamba's, cannot be cut so; and some models make a mask of their own, in
which positions do not count. So the model is asked: two short sequences, in one row, go into its forward, which ends
when it reaches the first block. What the block would be given must keep them apart. No weight of a block is touched.
"""

import inspect
import itertools
import logging
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_cxl.sequences.cross_entropy import IGNORED
from lightning_cxl.sequences.packed_mask import PackedMask
from lightning_cxl.sequences.packing import lengths_of
from lightning_cxl.streaming.units import find_units
from lightning_cxl.torch_private import is_compiled, tree_leaves

log = logging.getLogger("lightning_cxl")
_KINDS = frozenset({"full_attention", "sliding_attention"})
_QUESTION = (0, 1, 2, 0, 1, 2, 3)
"""Positions of the row that a model is asked about."""
_BEGINS = 3
"""Where its second sequence begins: a token that sees nothing but itself, in any window."""
_FORBIDDEN = -1e4
_told: set[str] = set()
_answers: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str | None]] = weakref.WeakKeyDictionary()
_windows_of: weakref.WeakKeyDictionary[nn.Module, tuple[Any, "Windows | None"]] = weakref.WeakKeyDictionary()


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
    kinds = set(getattr(config, "layer_types", None) or ())
    if "chunked_attention" in kinds:
        return "the chunks of its attention are counted from the beginning of the row"
    if getattr(model, "_is_stateful", False) or not kinds <= _KINDS:
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
    if not find_units(model):
        return "it has no repeated blocks, whose mask could be looked at"
    try:
        reached = first_block(model, torch.tensor([_QUESTION]), implementation)
    except Exception as error:  # whatever a model needs besides
        return f"it cannot be asked with tokens and positions alone ({type(error).__name__}: {error})"
    if reached is None:
        return "its forward does not call its blocks"
    if _is_flash(implementation):
        is_told = reached[1].get("cu_seq_lens_q") is not None
        return None if is_told else "its blocks are not told where sequences begin"
    return None if any(map(_is_cut, tree_leaves(reached))) else "its mask lets them attend to each other"


def first_block(
    model: nn.Module, position_ids: Tensor, implementation: str, **arguments: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return what the first block of `model` is given for a packed row; None where its forward calls none.

    Args:
        position_ids: ``(1, tokens)``.
    """

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _ReachedError(args, kwargs)

    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    positions = position_ids.to(device)
    others = [] if device.type == "cpu" else [device]
    handle = find_units(model)[0][1].register_forward_pre_hook(stop, with_kwargs=True)
    arguments |= _arguments(implementation, positions)
    try:
        with torch.no_grad(), torch.random.fork_rng(others, device_type=device.type):  # embeddings may drop some
            model(input_ids=torch.zeros_like(positions), use_cache=False, **arguments)
    except _ReachedError as reached:
        return reached.arguments
    finally:
        handle.remove()
    return None


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

    Raises:
        ConfigError: positions do not begin at 0 with each row and sequence, or do not count up by one.
    """
    why = why_not_apart(model)
    if why is not None:
        text = f"{type(model).__name__} cannot keep packed sequences apart: {why}. Each gets a row of its own."
        if text not in _told:
            _told.add(text)
            log.info(text)
        return None
    config: Any = model.config
    config = config.get_text_config()
    arguments = _arguments(config._attn_implementation, position_ids)
    if config._attn_implementation == "sdpa":
        windows = _windows(model, config, position_ids.shape[1])
        if windows is not None:
            arguments["attention_mask"] = _packed_masks(windows, position_ids)
    return arguments


Windows = dict[str | None, int | None]
"""Tokens that a token sees at most, None for all, by the kind of layer; None for all layers of a model."""


def _windows(model: nn.Module, config: Any, tokens: int) -> Windows | None:
    """Return the windows of a model that can be given `PackedMask`s for rows of `tokens`; None for any other model."""
    window = getattr(config, "sliding_window", None)
    window = window if isinstance(window, int) and 0 < window < tokens else None  # some say 0 for none
    # the loss of routers reads the mask, of two dimensions; a compiler would make a graph for each mask
    if getattr(config, "output_router_logits", False) or any(map(is_compiled, model.modules())):
        return None
    if model not in _windows_of or _windows_of[model][0] != window:
        try:
            found = next((each for each in _candidates(config, window) if _takes(model, each, window or 0)), None)
        except Exception:  # whatever a model does with a mask of a class of its own
            found = None
        _windows_of[model] = window, found
    return _windows_of[model][1]


def _candidates(config: Any, window: int | None) -> list[Windows]:
    kinds: set[str | None] = set(getattr(config, "layer_types", None) or ())
    if len(kinds) > 1:
        return [{kind: window if kind == "sliding_attention" else None for kind in kinds}]
    return [{None: None}, {None: window}] if window else [{None: None}]


def _takes(model: nn.Module, windows: Windows, longest: int) -> bool:
    """Return whether the first block has these windows, and is given the mask that the model is given."""
    from transformers import PreTrainedModel

    owner = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
    if owner is None or not type(owner).__module__.startswith("transformers.models."):
        return False
    positions = torch.tensor([[*range(longest + 2), *_QUESTION]])
    reached = first_block(model, positions, "sdpa")
    wanted = [each for each in tree_leaves(reached) if isinstance(each, Tensor) and each.dim() == 4]
    masks = _packed_masks(windows, positions.to(wanted[0].device))
    reached = first_block(model, positions, "sdpa", attention_mask=masks)
    given = [each for each in tree_leaves(reached) if isinstance(each, PackedMask)]
    return len(given) == 1 and any(torch.equal(given[0].whole(), each) for each in wanted)


def _packed_masks(windows: Windows, position_ids: Tensor) -> Any:
    rows, tokens = position_ids.shape
    flat, lengths = lengths_of(position_ids).tolist(), []
    for _ in range(rows):
        ends = list(itertools.takewhile(lambda end: end <= tokens, itertools.accumulate(flat)))
        lengths.append(flat[: len(ends)])
        flat = flat[len(ends) :]
    masks = {kind: PackedMask(lengths, position_ids.device, window=window) for kind, window in windows.items()}
    return masks.get(None, masks)


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
