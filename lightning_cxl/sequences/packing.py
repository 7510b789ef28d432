"""`pack_sequences` and `fit_rows`: sequences of many lengths, side by side in rows of one length.

[Note: Packed rows]
A row holds several sequences, one behind the other, and little or no padding. Positions tell them apart,
which begin at 0 with each of them: ``position_ids`` ``[0, 1, 2, 0, 1, 0, 1, 2, 3]`` are sequences of 3, 2 and 4 tokens.
They alone say where a sequence begins. Three things follow:

* No token attends to another sequence: `packed_arguments` lets the model's attention see to that.
* The first token of a sequence has no label: nothing in front of it predicts it.
* Padding at the end of a row has position 0 in every place. So each token of it is a sequence by itself, which nobody
  attends to, and which has no label.
"""

import bisect
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_cxl.errors import ConfigError
from lightning_cxl.sequences.chunked_loss import IGNORED, tell_once
from lightning_cxl.streaming.units import find_units
from lightning_cxl.torch_private import tree_leaves


def fit_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Return which sequences share a row: the numbers of those in each row, long ones first.

    The longest sequence that is left goes to the fullest row that has room for it (best fit, decreasing): few rows,
    and always the same ones for the same lengths.
    """
    if lengths and not 1 <= min(lengths) <= max(lengths) <= row_tokens:
        raise ConfigError(
            f"sequences of {min(lengths)} to {max(lengths)} tokens do not fit rows of {row_tokens}: leave empty ones "
            "out, and cut those that are longer than a row"
        )
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # left in a row, and its number; sorted
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect.bisect_left(room, (lengths[number], 0))
        if place == len(room):
            left, row = row_tokens, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(number)
        if left > lengths[number]:
            bisect.insort(room, (left - lengths[number], row))
    return rows


def pack_sequences(
    input_ids: Sequence[Sequence[int]], row_tokens: int, *, labels: Sequence[Sequence[int]] | None = None
) -> dict[str, list[list[int]]]:
    """Return sequences packed into rows of at most `row_tokens` tokens. See [Note: Packed rows].

    Sequences that are longer than a row are cut into pieces, each a sequence of its own. The result is what
    ``datasets.Dataset.map(batched=True)`` takes from a function.

    Args:
        input_ids: tokens of each sequence; empty ones are left out.
        row_tokens: most tokens of a row.
        labels: as many for each sequence; None: its tokens.

    Returns:
        ``input_ids``, ``labels`` (-100 at the first token of every sequence) and ``position_ids`` of each row.

    Raises:
        ConfigError: a sequence has not as many labels as tokens, or `row_tokens` is smaller than 1.
    """
    if row_tokens < 1:
        raise ConfigError(f"row_tokens is the number of tokens of a row: at least 1, got {row_tokens}")
    labels = input_ids if labels is None else labels
    counts = [len(ids) for ids in input_ids]
    if counts != [len(each) for each in labels]:
        raise ConfigError(
            f"sequences of {counts} tokens have {[len(each) for each in labels]} labels: give one a token"
        )
    pieces = [(i, start) for i, count in enumerate(counts) for start in range(0, count, row_tokens)]
    rows = fit_rows([min(row_tokens, counts[i] - start) for i, start in pieces], row_tokens)
    packed: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        parts = [(pieces[number][0], slice(pieces[number][1], pieces[number][1] + row_tokens)) for number in row]
        packed["input_ids"].append([token for i, part in parts for token in input_ids[i][part]])
        packed["labels"].append([label for i, part in parts for label in (IGNORED, *labels[i][part][1:])])
        packed["position_ids"].append([place for i, part in parts for place in range(len(input_ids[i][part]))])
    return packed


def lengths_of(position_ids: Tensor, *, padding_is_one: bool = False) -> Tensor:
    """Return the tokens of each sequence in packed rows ``(rows, tokens)``, and of paddings, row by row: int64."""
    steps = torch.diff(position_ids, prepend=torch.full_like(position_ids[:, :1], -1), dim=1)
    if not bool(((position_ids == 0) | (steps == 1)).all()):
        raise ConfigError(
            "positions of packed rows begin at 0 with each row and each sequence, and count up by one, as those of "
            "pack_sequences do. Count the positions of cut sequences anew"
        )
    begins = position_ids == 0
    if padding_is_one:
        begins[:, 1:] &= position_ids.flip(1).cumsum(1).flip(1)[:, :-1] > 0
    starts = begins.flatten().nonzero()[:, 0]
    return torch.diff(starts, append=starts.new_tensor([begins.numel()]))


# `packed_arguments`: what a model of transformers is given so that packed sequences do not attend to each other.
#
# [Note: Boundaries of packed sequences]
# Models of transformers keep packed sequences apart in their own ways, which depend on how they attend:
#
# * eager, sdpa and flex attention: the model makes a block-diagonal mask where positions begin anew, for each row of a
#   batch. It looks for that only where it is given no ``attention_mask`` and no cache.
# * flash attention: the kernel is told where sequences begin. The model finds that out from positions for a batch of
#   one row only; in larger batches sequences would attend to each other. So it is told, for all rows together.
#
# A state that runs over the whole row, such as Mamba's, cannot be cut so; and some models make a mask of their own, in
# which positions do not count. So the model is asked: two short sequences, in one row, go into its forward, which ends
# when it reaches the first block. The mask that the block would get must keep them apart. Blocks do not run.

_KINDS = frozenset({"full_attention", "sliding_attention"})
_QUESTION = (0, 1, 2, 0, 1, 2, 3)  # positions of the row that a model is asked about
_BEGINS = 3  # where its second sequence begins: a token that sees nothing but itself, in any window
_FORBIDDEN = -1e4
_answers: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str | None]] = weakref.WeakKeyDictionary()


def why_not_apart(model: nn.Module) -> str | None:
    """Return why packed sequences cannot be kept apart in `model`; None where they can."""
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
    model: nn.Module, position_ids: Tensor, implementation: str
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return what the first block of `model` is given for a packed row; None where its forward calls none."""

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _ReachedError(args, kwargs)

    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    positions = position_ids.to(device)
    others = [] if device.type == "cpu" else [device]
    handle = find_units(model)[0][1].register_forward_pre_hook(stop, with_kwargs=True)
    arguments = _arguments(implementation, positions)
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
    if rule is None:
        return False
    seen_by_rule = [bool(rule(*map(torch.tensor, (0, 0, _BEGINS, key)))) for key in range(_BEGINS + 1)]
    return seen_by_rule == [False] * _BEGINS + [True]


def packed_arguments(model: nn.Module, position_ids: Tensor) -> dict[str, Any] | None:
    """Return what the forward of `model` is given for packed rows, besides ``input_ids`` and ``use_cache=False``.

    See [Note: Boundaries of packed sequences].

    Args:
        model: a causal language model of transformers.
        position_ids: int64 ``(rows, tokens)``, which begin at 0 with each sequence; see [Note: Packed rows].

    Returns:
        Keyword arguments. None where `model` would let sequences attend to each other; a line in the log says why.

    Raises:
        ConfigError: with flash attention, positions do not begin at 0 with each row and sequence, or do not count up.
    """
    why = why_not_apart(model)
    if why is not None:
        tell_once(f"{type(model).__name__} cannot keep packed sequences apart: {why}. Each gets a row of its own.")
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
    lengths = lengths_of(position_ids, padding_is_one=True).tolist()
    pieces = zip(torch.split(input_ids.flatten(), lengths), torch.split(labels.flatten(), lengths), strict=True)
    kept = [(ids, own) for ids, own in pieces if bool((own[1:] != IGNORED).any())] or [(input_ids[0], labels[0])]
    ids, own = ([pair[which] for pair in kept] for which in (0, 1))
    padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return padded, nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=IGNORED)


def _is_flash(implementation: str) -> bool:
    return "flash" in implementation
