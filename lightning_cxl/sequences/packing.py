"""`pack_sequences` and `fit_rows`: sequences of many lengths, side by side in rows of one length.

[Note: Packed rows]
A row holds several sequences, one behind the other, and little or no padding. What tells them apart are positions,
which begin at 0 with each of them: ``position_ids`` ``[0, 1, 2, 0, 1, 0, 1, 2, 3]`` are sequences of 3, 2 and 4 tokens.
Nothing else says where a sequence begins. Three things follow from positions:

* No token attends to another sequence: `packed_arguments` lets the model's attention see to that.
* The first token of a sequence has no label: nothing in front of it predicts it.
* Padding at the end of a row has position 0 in every place. So each token of it is a sequence by itself, which nobody
  attends to, and which has no label.
"""

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_cxl.errors import ConfigError
from lightning_cxl.sequences.cross_entropy import IGNORED


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
            "pack_sequences do. What is cut must be counted anew"
        )
    flat = position_ids.flatten()
    starts = (flat == 0).nonzero()[:, 0]
    return torch.diff(starts, append=starts.new_tensor([len(flat)]))
