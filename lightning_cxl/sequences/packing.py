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
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_cxl.errors import ConfigError
from lightning_cxl.sequences.chunked_loss import IGNORED, LazyTensor, tell_once
from lightning_cxl.streaming.units import find_units
from lightning_cxl.torch_private import is_compiled, tree_leaves, wrapper_tensor


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
    input_ids: Sequence[Sequence[int]],
    row_tokens: int,
    *,
    labels: Sequence[Sequence[int]] | None = None,
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


def without_first(labels: Tensor, position_ids: Tensor) -> Tensor:
    """Return labels of packed rows without those of the first token of each sequence."""
    return labels.masked_fill(position_ids == 0, IGNORED)


def lengths_of(position_ids: Tensor) -> Tensor:
    """Return the tokens of each sequence in packed rows ``(rows, tokens)``, one row after the other: int64."""
    steps = torch.diff(position_ids, prepend=torch.full_like(position_ids[:, :1], -1), dim=1)
    if not bool(((position_ids == 0) | (steps == 1)).all()):
        raise ConfigError(
            "positions of packed rows begin at 0 with each row and each sequence, and count up by one, as those of "
            "pack_sequences do. Count the positions of cut sequences anew"
        )
    flat = position_ids.flatten()
    starts = (flat == 0).nonzero()[:, 0]
    return torch.diff(starts, append=starts.new_tensor([len(flat)]))


# ----------------------------------------------------------------------------------------------------
# `PackedMask`: the attention mask of packed rows, which no one has to make.
#
# [Note: Attention document by document]
# A mask has one number for each pair of tokens of a row: 1 GiB for 32,768 tokens. In packed rows nearly all of them are
# False, and sdpa attention still computes all pairs. So models of transformers that use sdpa attention are given a
# `PackedMask`. They hand it on, as they do with every mask of four dimensions, to
# ``torch.nn.functional.scaled_dot_product_attention``, which is torch's way to ask a tensor of a class of its own. It
# is answered in pieces:
#
# * A long document is a piece, causal and without a mask: torch has its fastest kernels for that.
# * Short documents that follow each other, up to `_GROUP_TOKENS` together, are a piece with a small mask of their own.
#   Padding at the end of a row, in which each token is a document, is in such pieces, too.
# * A long document of a layer with a sliding window is cut into parts at least as long as the window. A part attends to
#   itself and to the part before.
#
# Any other operation on the mask gets it as it is in transformers, made then: right, but large and slow.

_GROUP_TOKENS = 256


class PackedMask(LazyTensor):
    """Bool ``(rows, 1, tokens, tokens)``: which keys a query sees. See [Note: Attention document by document]."""

    FIELDS = LazyTensor.FIELDS | {"requires_grad", "is_leaf", "_version", "is_sparse", "is_nested", "grad_fn", "grad"}
    METHODS = LazyTensor.METHODS | {"is_inference", "is_complex"}
    _lengths: Sequence[Sequence[int]]
    _window: int | None
    _all: Tensor | None
    _small: dict[Any, Tensor]

    @staticmethod
    def __new__(
        cls, lengths: Sequence[Sequence[int]], device: torch.device, *, window: int | None = None
    ) -> "PackedMask":
        # in a window a token sees that many tokens at most, itself included; else all of its document
        tokens = sum(lengths[0])
        self: PackedMask = wrapper_tensor(cls, (len(lengths), 1, tokens, tokens), torch.bool, device)
        self._lengths, self._window, self._all, self._small = lengths, window, None, {}
        return self

    def made(self, operation: str) -> Tensor:
        """Return the whole mask; says once what asks for it."""
        tell_once(f"The mask of packed rows is made as a whole: `{operation}` asks for it.")
        if self._all is None:
            self._all = self.whole()
        return self._all

    def whole(self) -> Tensor:
        return torch.stack([self._visible(each) for each in self._lengths])[:, None]

    def _visible(self, lengths: Sequence[int]) -> Tensor:
        counts = torch.tensor(lengths, device=self.device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=self.device), counts)
        visible = (document[:, None] == document).tril()
        return visible if self._window is None else visible.triu(1 - self._window)

    def _kept(self, key: Any, lengths: Sequence[int], first_query: int = 0) -> Tensor:
        """Return a small mask for queries from `first_query` on; it is made once."""
        if key not in self._small:
            self._small[key] = self._visible(lengths)[first_query:]
        return self._small[key]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return what ``scaled_dot_product_attention`` returns with this mask."""
        rows = []
        for lengths, *row in zip(self._lengths, *(torch.split(each, 1) for each in (query, key, value)), strict=True):
            pieces: list[tuple[int, ...]] = []  # documents in their order: long ones alone, short neighbours together
            for length in lengths:
                if pieces and sum(pieces[-1]) + length <= _GROUP_TOKENS:
                    pieces[-1] += (length,)
                else:
                    pieces.append((length,))
            sizes = list(map(sum, pieces))
            # `split`, not slices: its backward puts gradients side by side, that of slices adds up whole tensors
            parts = zip(*(torch.split(each, sizes, 2) for each in row), strict=True)
            rows.append(torch.cat([self._of_piece(*each, options) for each in zip(pieces, parts, strict=True)], 2))
        return torch.cat(rows)

    def _of_piece(
        self, lengths: tuple[int, ...], tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]
    ) -> Tensor:
        attention, window, tokens = functional.scaled_dot_product_attention, self._window, sum(lengths)
        if len(lengths) > 1 or (window is not None and window < tokens <= _GROUP_TOKENS):
            return attention(*tensors, attn_mask=self._kept(lengths, lengths), **options)
        if window is None or tokens <= window:
            return attention(*tensors, is_causal=True, **options)
        size = max(window, _GROUP_TOKENS)
        results: list[Tensor] = []
        before: tuple[Tensor, Tensor] | None = None
        for query, key, value in zip(*(torch.split(each, size, 2) for each in tensors), strict=True):
            keys, values = key, value
            if before is not None:
                keys, values = (torch.cat(both, 2) for both in zip(before, (key, value), strict=True))
            new, old = query.shape[2], keys.shape[2] - query.shape[2]
            mask = self._kept((new, old), [old + new], old)  # no group of documents is that long, or 0 tokens long
            results.append(attention(query, keys, values, attn_mask=mask, **options))
            before = key, value
        return torch.cat(results, 2)

    @classmethod
    def lazily(cls, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("detach", "clone", "contiguous"):
            return args[0]
        if func is functional.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            given |= kwargs
            mask = given.pop("attn_mask", None)
            is_alone = isinstance(mask, cls) and mask._all is None and not given.pop("is_causal", False)
            three = [given[each] for each in ("query", "key", "value")]
            if is_alone and all(each.dim() == 4 and each.shape[::2] == mask.shape[::2] for each in three):
                return mask.attend(**given)
        return NotImplemented


# ----------------------------------------------------------------------------------------------------
# `packed_arguments`: what a model of transformers is given so that packed sequences do not attend to each other.
#
# [Note: Boundaries of packed sequences]
# Models of transformers keep packed sequences apart in their own ways, which depend on how they attend:
#
# * eager, sdpa and flex attention: the model makes a block-diagonal mask where positions begin anew, for each row of a
#   batch. It looks for that only where it is given no ``attention_mask`` and no cache.
# * sdpa attention needs no such mask where the model takes a `PackedMask`, see [Note: Attention document by document].
#   Models that are compiled, or whose routers have a loss, which reads the mask, are not given one.
# * flash attention: the kernel is told where sequences begin. The model finds that out from positions for a batch of
#   one row only; in larger batches sequences would attend to each other. So it is told, for all rows together.
#
# A state that runs over the whole row, such as Mamba's, cannot be cut so; and some models make a mask of their own, in
# which positions do not count. So the model is asked: two short sequences, in one row, go into its forward, which ends
# when it reaches the first block. The mask that the block would get must keep them apart. Blocks do not run.

_KINDS = frozenset({"full_attention", "sliding_attention"})
_QUESTION = (0, 1, 2, 0, 1, 2, 3)
"""Positions of the row that a model is asked about."""
_BEGINS = 3
"""Where its second sequence begins: a token that sees nothing but itself, in any window."""
_FORBIDDEN = -1e4
_answers: weakref.WeakKeyDictionary[nn.Module, tuple[Any, str | None]] = weakref.WeakKeyDictionary()
_windows_of: weakref.WeakKeyDictionary[nn.Module, tuple[Any, "Windows | None"]] = weakref.WeakKeyDictionary()


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
    model: nn.Module, position_ids: Tensor, implementation: str, **arguments: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return what the first block of `model` is given for a packed row; None where its forward calls none."""

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
        ConfigError: positions do not begin at 0 with each row and sequence, or do not count up by one.
    """
    why = why_not_apart(model)
    if why is not None:
        tell_once(f"{type(model).__name__} cannot keep packed sequences apart: {why}. Each gets a row of its own.")
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
        candidates: list[Windows] = [{None: None}, {None: window}] if window else [{None: None}]
        try:
            kinds: set[str | None] = set(getattr(config, "layer_types", None) or ())
            if len(kinds) > 1:
                candidates = [{kind: window if kind == "sliding_attention" else None for kind in kinds}]
            found = next((each for each in candidates if _takes(model, each, window or 0)), None)
        except Exception:  # whatever a model does with a mask of a class of its own
            found = None
        _windows_of[model] = window, found
    return _windows_of[model][1]


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
