"""`TextData`: text files packed into blocks of equal length, in an order that a resumed run continues."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset, Features, List, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_cxl.errors import CheckpointError, ConfigError
from lightning_cxl.finetune.corpus import corpus_fingerprint, load_documents, stdlib_files, user_files
from lightning_cxl.finetune.tokenizer import cached_tokenizer, load_tokenizer
from lightning_cxl.integrations.lightning.lightning_api import LightningDataModule

Batch = dict[str, Tensor]
_SPLIT_SEED = 0  # one split for all runs, so that their validation losses compare
_DOCUMENTS_PER_PACK = 512


class BlockLoader:
    """Batches of blocks; knows where it is, so that a checkpoint in the middle of an epoch resumes exactly.

    The order of an epoch depends on `seed` and the epoch's number alone. Lightning calls `set_epoch` (through
    `sampler`), stores `state_dict()` in its checkpoints and calls `load_state_dict()` before the first batch.

    Args:
        blocks: Rows ``{"input_ids": int64 (seq_len,)}``.
        batch_size: Blocks in a batch; the blocks that fill no whole batch are left out of the epoch.
        seed: None keeps the order of `blocks`.
        rank: Which of `world_size` processes this is: each reads its own share of every epoch.
        world_size: Number of processes.
    """

    batch_sampler = None  # Lightning asks every loader that has a `sampler`

    def __init__(
        self, blocks: Dataset, batch_size: int, *, seed: int | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        self.blocks = blocks
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self._next_batch = 0  # of the running epoch: what a checkpoint taken now must continue with
        self._start = 0  # where the next iterator starts; not 0 only after load_state_dict()

    @property
    def sampler(self) -> "BlockLoader":
        """Where Lightning looks for `set_epoch`."""
        return self

    def __len__(self) -> int:
        return len(self.blocks) // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        # a generator: epoch and start are read at the first batch, after Lightning's set_epoch()
        start, self._start = self._start, 0
        order = self._order()
        for index in range(start, len(self)):
            self._next_batch = index + 1
            yield {
                "input_ids": self.blocks[order[index * self.batch_size : (index + 1) * self.batch_size]]["input_ids"]
            }

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the iterators to come; a new epoch starts at its first batch."""
        if epoch != self.epoch:
            self.epoch, self._start, self._next_batch = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what it depends on."""
        return {"epoch": self.epoch, "next_batch": self._next_batch, "order": self._order_key()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of `state`.

        Raises:
            CheckpointError: `state` is in the middle of an epoch of other data, batch size or seed.
        """
        if 0 < state["next_batch"] < len(self) and state["order"] != self._order_key():
            raise CheckpointError(
                f"the checkpoint is at batch {state['next_batch']} of an epoch over {state['order']}, this run reads "
                f"{self._order_key()}. Use the same data options, or start a new run from exported weights "
                "(--model.name_or_path)"
            )
        self.epoch = state["epoch"]
        self._start = self._next_batch = state["next_batch"]

    def _order(self) -> list[int]:
        """Return this process's block numbers in the order of the epoch."""
        if self.seed is None:
            order = torch.arange(len(self.blocks))
        else:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(len(self.blocks), generator=generator)
        own: list[int] = order[self.rank :: self.world_size].tolist()
        return own

    def _order_key(self) -> dict[str, Any]:
        """Return what, together with the epoch's number, decides the order."""
        return {
            "num_blocks": len(self.blocks),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "world_size": self.world_size,
        }


class TextData(LightningDataModule):
    """Text files as blocks of `seq_len` tokens, ready for a causal language model.

    Documents are shuffled once, tokenized, ended with the end-of-text token and packed without padding; a block may
    hold several documents, and attention is not cut between them. The last `val_fraction` of the blocks is held out
    for validate, test and predict. Everything made is cached (LIGHTNING_CXL_CACHE) and made again when text,
    tokenizer or `seq_len` change.
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
    ) -> None:
        """Remember the options; files are read in `prepare_data`.

        Args:
            text_files: Files or globs (UTF-8 text, one document each). None: the Python standard library's sources.
            seq_len: Tokens in a block.
            batch_size: Blocks in a batch, per process.
            vocab_size: Size of the byte-level BPE that is trained on the files; unused with a model's own tokenizer.
            val_fraction: Share of the blocks that is held out.
            seed: Of the order of the training blocks.
            tokenizer_name_or_path: Use this tokenizer (hub id or folder) instead of training one.

        Raises:
            ConfigError: a number that makes no sense.
        """
        super().__init__()
        if seq_len < 2 or batch_size < 1 or not 0 < val_fraction < 1:
            raise ConfigError(
                f"need seq_len >= 2, batch_size >= 1 and 0 < val_fraction < 1; got seq_len {seq_len}, "
                f"batch_size {batch_size}, val_fraction {val_fraction}"
            )
        self.text_files = text_files
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.vocab_size = vocab_size
        self.val_fraction = val_fraction
        self.seed = seed
        self.tokenizer_name_or_path = tokenizer_name_or_path
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._train: Dataset | None = None
        self._val: Dataset | None = None

    def prepare_data(self) -> None:
        """Read, tokenize and pack into the cache (one process per machine; a few seconds at the first time)."""
        self._load()

    def setup(self, stage: str | None = None) -> None:
        """Open what `prepare_data` left in the cache; sets `tokenizer`.

        Raises:
            ConfigError: the text is too short for one batch of each split.
        """
        if self._train is not None:
            return
        tokenizer, blocks = self._load()
        num_val = max(self.batch_size * self._world_size(), round(len(blocks) * self.val_fraction))
        num_train = len(blocks) - num_val
        if num_train < self.batch_size * self._world_size():
            raise ConfigError(
                f"the text gives {len(blocks)} blocks of {self.seq_len} tokens, too few for one training and one "
                f"validation batch of {self.batch_size}: add text, or lower seq_len or batch_size"
            )
        self.tokenizer = tokenizer
        self._train = blocks.select(range(num_train))
        self._val = blocks.select(range(num_train, len(blocks)))

    def train_dataloader(self) -> BlockLoader:
        """Return the training blocks, shuffled by (seed, epoch)."""
        return self._loader(self._train, self.seed)

    def val_dataloader(self) -> BlockLoader:
        """Return the held-out blocks in fixed order."""
        return self._loader(self._val, None)

    def test_dataloader(self) -> BlockLoader:
        """Return the held-out blocks."""
        return self.val_dataloader()

    def predict_dataloader(self) -> BlockLoader:
        """Return the held-out blocks."""
        return self.val_dataloader()

    def _loader(self, blocks: Dataset | None, seed: int | None) -> BlockLoader:
        assert blocks is not None, "setup() comes first"
        rank = self.trainer.global_rank if self.trainer is not None else 0
        return BlockLoader(blocks, self.batch_size, seed=seed, rank=rank, world_size=self._world_size())

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _load(self) -> tuple[PreTrainedTokenizerBase, Dataset]:
        """Return the tokenizer and all blocks, from the caches where they have them."""
        files = stdlib_files() if self.text_files is None else user_files(self.text_files)
        documents = load_documents(files)
        corpus_key = corpus_fingerprint(documents)
        if self.tokenizer_name_or_path is not None:
            tokenizer = load_tokenizer(self.tokenizer_name_or_path)
        else:
            texts = (text for batch in documents.iter(batch_size=64) for text in batch["text"])
            tokenizer = cached_tokenizer(texts, self.vocab_size, corpus_key)
        return tokenizer, pack(documents, tokenizer, self.seq_len)


def pack(documents: Dataset, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> Dataset:
    """Return the documents, shuffled, as blocks ``{"input_ids": int64 (seq_len,)}``; cached by `datasets`.

    What does not fill a block at the end of each 512 documents is dropped.
    """
    blocks = documents.shuffle(seed=_SPLIT_SEED).map(
        _pack_batch,
        fn_kwargs={"tokenizer": tokenizer, "seq_len": seq_len},
        batched=True,
        batch_size=_DOCUMENTS_PER_PACK,
        remove_columns=["text"],
        features=Features({"input_ids": List(Value("int32"))}),
        desc="Tokenizing",
    )
    return blocks.with_format("torch")


def _pack_batch(batch: dict[str, Sequence[str]], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> dict[str, Any]:
    encoded = tokenizer(list(batch["text"]), add_special_tokens=False, verbose=False)["input_ids"]
    stream = [token for document in encoded for token in (*document, tokenizer.eos_token_id)]
    usable = len(stream) - len(stream) % seq_len
    return {"input_ids": [stream[start : start + seq_len] for start in range(0, usable, seq_len)]}
