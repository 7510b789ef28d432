"""`TextData`: text or conversations of files, as batches for a causal language model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.chat import IGNORED, plain_text, with_template
from lightning_cxl.finetune.conversations import LineError, read_conversation
from lightning_cxl.finetune.corpus import (
    corpus_fingerprint,
    documents_of_lines,
    form_of_files,
    load_documents,
    stdlib_files,
    user_files,
)
from lightning_cxl.finetune.loader import SampleLoader, Samples
from lightning_cxl.finetune.samples import PackedRows, pack, tokenize_conversations, with_answers
from lightning_cxl.finetune.tokenizer import cached_tokenizer, load_tokenizer
from lightning_cxl.integrations.lightning.lightning_api import LightningDataModule

_PROMPT_TOKENS = 16


class HeldOut(NamedTuple):
    """A held-out sample, cut in two: int64 ``(tokens,)`` each."""

    prompt: Tensor
    expected: Tensor
    """The answer, or the rest of a block."""


class TextData(LightningDataModule):
    """Text files as blocks of `seq_len` tokens, or conversations as samples of up to `seq_len` tokens.

    What the files hold is found out from their first lines: conversations or documents in JSONL (see
    `conversations.EXPECTED`), or plain text, a document per file.

    Documents are shuffled once, tokenized, ended with the end-of-text token and packed without padding. Conversations
    are shuffled once and tokenized with the chat template of the tokenizer, or with `chat.FALLBACK_TEMPLATE`; what the
    assistant did not say has the label -100. Several of them share a row of `seq_len` tokens, where there are enough
    for a batch of such rows. In blocks and rows nothing attends to another document or conversation.

    The last `val_fraction` of the samples is held out for validate, test and predict. Everything made is cached
    (LIGHTNING_CXL_CACHE) and made again when text, tokenizer or `seq_len` change.
    """

    def __init__(
        self,
        text_files: str | list[str] | None = None,
        *,
        seq_len: int = 256,
        batch_size: int = 6,
        vocab_size: int = 8192,
        val_fraction: float = 0.05,
        seed: int = 0,
        tokenizer_name_or_path: str | None = None,
        train_on: Literal["answers", "all"] = "answers",
    ) -> None:
        """Remember the options; files are read in `prepare_data`.

        Args:
            text_files: Files or globs: text in UTF-8, or JSONL with conversations or documents, a line each. None: the
                Python standard library's sources.
            seq_len: Tokens in a block, and most tokens of a conversation.
            batch_size: Blocks or rows in a batch, per process.
            vocab_size: Size of the byte-level BPE that is trained on the files; unused with a model's own tokenizer.
            val_fraction: Share of the samples that is held out.
            seed: Of the order of the training samples.
            tokenizer_name_or_path: Use this tokenizer (hub id or folder) instead of training one.
            train_on: What is learned of conversations: "answers" is what the assistant says, "all" the questions, too.

        Raises:
            ConfigError: an option that makes no sense.
        """
        super().__init__()
        if seq_len < 2 or batch_size < 1 or not 0 < val_fraction < 1:
            raise ConfigError(
                f"need seq_len >= 2, batch_size >= 1 and 0 < val_fraction < 1; got seq_len {seq_len}, "
                f"batch_size {batch_size}, val_fraction {val_fraction}"
            )
        if train_on not in ("answers", "all"):
            raise ConfigError(f'train_on must be "answers" or "all", not {train_on!r}')
        self.text_files = text_files
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.vocab_size = vocab_size
        self.val_fraction = val_fraction
        self.seed = seed
        self.tokenizer_name_or_path = tokenizer_name_or_path
        self.train_on = train_on
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._train: Samples | None = None
        self._val: Samples | None = None
        self._held_out: Dataset | None = None

    def prepare_data(self) -> None:
        """Read and tokenize into the cache (one process per machine; a few seconds at the first time)."""
        self._load()

    def setup(self, stage: str | None = None) -> None:
        """Open what `prepare_data` left in the cache; sets `tokenizer`.

        Raises:
            ConfigError: there is too little for one batch of each split.
        """
        if self._train is not None:
            return
        tokenizer, samples = self._load()
        of = f"blocks of {self.seq_len} tokens"
        if "scored" in samples.column_names:
            samples, of = with_answers(samples, self.seq_len), "conversations"
        num_val = max(self.batch_size * self._world_size(), round(len(samples) * self.val_fraction))
        num_train = len(samples) - num_val
        if num_train < self.batch_size * self._world_size():
            raise ConfigError(
                f"the files give {len(samples)} {of}, too few for one training and one validation batch of "
                f"{self.batch_size}: add some, or lower seq_len or batch_size"
            )
        self.tokenizer = tokenizer
        self._held_out = samples.select(range(num_train, len(samples)))
        self._train = self._packed(samples.select(range(num_train)))
        self._val = self._packed(self._held_out)

    def train_dataloader(self) -> SampleLoader:
        """Return the training samples, shuffled by (seed, epoch)."""
        return self._loader(self._train, self.seed)

    def val_dataloader(self) -> SampleLoader:
        """Return the held-out samples in fixed order."""
        return self._loader(self._val, None)

    def test_dataloader(self) -> SampleLoader:
        """Return the held-out samples."""
        return self.val_dataloader()

    def predict_dataloader(self) -> SampleLoader:
        """Return the held-out samples."""
        return self.val_dataloader()

    def held_out(self, count: int) -> list[HeldOut]:
        """Return the beginnings of the first `count` held-out samples, or of all where there are fewer, after `setup`.

        That of a conversation ends where the first answer begins, that of a block after 16 tokens.
        """
        assert self._held_out is not None, "setup() comes first"
        return [_cut(self._held_out[number]) for number in range(min(count, len(self._held_out)))]

    def _packed(self, samples: Dataset) -> Samples:
        """Return conversations in rows, where that leaves a batch of rows; blocks as they are."""
        if "position_ids" not in samples.column_names:
            rows = PackedRows(samples, self.seq_len)
            if len(rows) >= self.batch_size * self._world_size():
                return rows
        unpacked: Samples = samples
        return unpacked

    def _loader(self, samples: Samples | None, seed: int | None) -> SampleLoader:
        assert samples is not None and self.tokenizer is not None, "setup() comes first"
        rank = self.trainer.global_rank if self.trainer is not None else 0
        pad_id = self.tokenizer.eos_token_id
        return SampleLoader(
            samples, self.batch_size, pad_id=pad_id, seed=seed, rank=rank, world_size=self._world_size()
        )

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _load(self) -> tuple[PreTrainedTokenizerBase, Dataset]:
        """Return the tokenizer and all samples, from the caches where they have them."""
        files = stdlib_files() if self.text_files is None else user_files(self.text_files)
        form = "text" if self.text_files is None else form_of_files(files)
        if form == "conversations":
            return self._load_conversations(files)
        documents = load_documents(files) if form == "text" else documents_of_lines(files)
        tokenizer = self._load_tokenizer(documents, _texts(documents))
        return tokenizer, pack(documents, tokenizer, self.seq_len)

    def _load_conversations(self, files: list[Path]) -> tuple[PreTrainedTokenizerBase, Dataset]:
        lines = load_documents(files, by_line=True)
        try:
            texts = (plain_text(read_conversation(line)) for line in _texts(lines) if line.strip())
            tokenizer = with_template(self._load_tokenizer(lines, texts))
            train_on_all = self.train_on == "all"
            return tokenizer, tokenize_conversations(lines, tokenizer, self.seq_len, train_on_all=train_on_all)
        except LineError as error:
            raise error.located(files) from error

    def _load_tokenizer(self, rows: Dataset, texts: Iterator[str]) -> PreTrainedTokenizerBase:
        if self.tokenizer_name_or_path is not None:
            return load_tokenizer(self.tokenizer_name_or_path)
        return cached_tokenizer(texts, self.vocab_size, corpus_fingerprint(rows))


def _cut(sample: Mapping[str, Tensor]) -> HeldOut:
    ids, labels = sample["input_ids"], sample.get("labels")
    if labels is None or bool((labels == ids).all()):
        return HeldOut(ids[:_PROMPT_TOKENS], ids[_PROMPT_TOKENS:])
    start = max(1, int((labels != IGNORED).nonzero()[0]))  # nothing can be generated from no token
    after = (labels[start:] == IGNORED).nonzero()
    return HeldOut(ids[:start], ids[start : start + int(after[0]) if len(after) else None])


def _texts(rows: Dataset) -> Iterator[str]:
    return (text for batch in rows.iter(batch_size=64) for text in batch["text"])
