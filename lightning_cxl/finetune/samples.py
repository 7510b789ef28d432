"""Documents and conversations as samples of tokens: `datasets.Dataset`s, cached on disk and read by memory map."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.finetune.chat import IGNORED, TemplateMismatchError, samples_of
from lightning_cxl.finetune.conversations import LineError, read_conversation
from lightning_cxl.sequences.packing import fit_rows

_SPLIT_SEED = 0  # one split for all runs, so that their validation losses compare
_DOCUMENTS_PER_PACK = 512
_TEXT_RECIPE = "text2"  # part of the cache key: change it when blocks of the same documents change
_CHAT_RECIPE = "chat2"  # the same, for samples of the same lines


def pack(documents: Dataset, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> Dataset:
    """Return the documents, shuffled, as blocks; cached by `datasets`.

    A document is what the tokenizer makes of it, with the token that some begin texts with, and the end-of-text token
    behind it. Blocks are cut from the documents one behind the other, so all of them are full, and a document may go on
    in the next block, as a sequence of its own. What does not fill a block at the end of each 512 documents is dropped.

    Returns:
        Rows ``{"input_ids", "position_ids": int64 (seq_len,)}``. See [Note: Packed rows].
    """
    blocks = documents.shuffle(seed=_SPLIT_SEED).map(
        _pack_batch,
        fn_kwargs={"tokenizer": tokenizer, "seq_len": seq_len, "recipe": _TEXT_RECIPE},
        batched=True,
        batch_size=_DOCUMENTS_PER_PACK,
        remove_columns=["text"],
        features=Features({"input_ids": List(Value("int32")), "position_ids": List(Value("int32"))}),
        desc="Tokenizing",
    )
    return blocks.with_format("torch")


def _pack_batch(
    batch: dict[str, Sequence[str]], tokenizer: PreTrainedTokenizerBase, seq_len: int, recipe: str
) -> dict[str, Any]:
    encoded = tokenizer(list(batch["text"]), verbose=False)["input_ids"]
    documents = [_ended(document, tokenizer.eos_token_id) for document in encoded]
    stream = [token for document in documents for token in document]
    places = [place for document in documents for place in range(len(document))]
    usable = len(stream) - len(stream) % seq_len
    starts = range(0, usable, seq_len)
    return {
        "input_ids": [stream[start : start + seq_len] for start in starts],
        "position_ids": [_from_zero(places[start : start + seq_len]) for start in starts],
    }


def _ended(document: list[int], end_of_text: int) -> list[int]:
    """Return the tokens of a document with the end-of-text token behind them, which some tokenizers put there."""
    return document if document[-1:] == [end_of_text] else [*document, end_of_text]


def _from_zero(places: list[int]) -> list[int]:
    """Return places in documents of a block that may begin within one: from there they count from 0, too."""
    first_end = next((index for index, place in enumerate(places) if index and place == 0), len(places))
    return [*range(first_end), *places[first_end:]]


class PackedRows:
    """Samples of different lengths, several in a row. See [Note: Packed rows].

    Args:
        samples: Rows ``{"input_ids", "labels": int64 (tokens,)}``.
        row_tokens: Most tokens of a row; no sample has more.
    """

    def __init__(self, samples: Dataset, row_tokens: int) -> None:
        self._samples = samples
        self._rows = fit_rows([len(ids) for ids in samples.with_format("numpy")["input_ids"]], row_tokens)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: list[int]) -> dict[str, list[Tensor]]:
        """Return ``input_ids``, ``labels`` and ``position_ids`` of some rows."""
        packed: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "position_ids": []}
        for row in rows:
            found = self._samples[self._rows[row]]
            packed["input_ids"].append(torch.cat(list(found["input_ids"])))
            packed["labels"].append(torch.cat(list(found["labels"])))
            packed["position_ids"].append(torch.cat([torch.arange(len(ids)) for ids in found["input_ids"]]))
        return packed


def tokenize_conversations(
    lines: Dataset, tokenizer: PreTrainedTokenizerBase, seq_len: int, *, train_on_all: bool
) -> Dataset:
    """Return the conversations of JSONL lines, shuffled, as samples of at most `seq_len` tokens; cached by `datasets`.

    Args:
        lines: Rows ``{"text": one line}``; empty lines are left out.
        tokenizer: With a chat template.
        seq_len: Longer samples lose their end.
        train_on_all: As `samples_of` has it.

    Returns:
        Rows ``{"input_ids", "labels": int64 (tokens,), "length", "scored"}``: tokens before the end was cut, and labels
        that a model which predicts the next token is scored by.

    Raises:
        LineError: a line is no conversation, or one that the template cannot show.
    """
    samples = lines.shuffle(seed=_SPLIT_SEED).map(
        _tokenize_batch,
        fn_kwargs={
            "tokenizer": tokenizer,
            "seq_len": seq_len,
            "train_on_all": train_on_all,
            "recipe": _CHAT_RECIPE,
        },
        batched=True,
        remove_columns=["text"],
        features=Features(
            {
                "input_ids": List(Value("int32")),
                "labels": List(Value("int32")),
                "length": Value("int64"),
                "scored": Value("int64"),
            }
        ),
        desc="Tokenizing",
    )
    return samples.with_format("torch")


def with_answers(samples: Dataset, seq_len: int) -> Dataset:
    """Return the samples of `tokenize_conversations` that have an answer; warn of those that were cut."""
    columns = samples.with_format("numpy")
    lengths, scored = (np.asarray(columns[name][:], dtype=np.int64) for name in ("length", "scored"))
    kept = np.flatnonzero(scored)
    long = int((lengths > seq_len).sum())
    if long or len(kept) < len(samples):
        warnings.warn(
            f"of {len(samples)} samples {long} are longer than {seq_len} tokens and lose their end; "
            f"{len(samples) - len(kept)} have no answer in what is left and are left out. The longest has "
            f"{lengths.max()} tokens: raise data.seq_len",
            LightningCXLWarning,
            stacklevel=2,
        )
    return samples.select(kept).select_columns(["input_ids", "labels"])


def _tokenize_batch(
    batch: dict[str, Sequence[str]], tokenizer: PreTrainedTokenizerBase, seq_len: int, train_on_all: bool, recipe: str
) -> dict[str, Any]:
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "length": [], "scored": []}
    for line in batch["text"]:
        if not line.strip():
            continue
        try:
            samples = samples_of(read_conversation(line), tokenizer, train_on_all=train_on_all)
        except TemplateMismatchError as error:
            raise LineError(line, str(error)) from error
        for sample in samples:
            labels = sample.labels[:seq_len]
            rows["input_ids"].append(sample.input_ids[:seq_len])
            rows["labels"].append(labels)
            rows["length"].append(len(sample.input_ids))
            rows["scored"].append(sum(label != IGNORED for label in labels[1:]))
    return rows
