"""`SampleLoader`: batches of samples, in an order that a resumed run continues."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_cxl.errors import CheckpointError
from lightning_cxl.finetune.chat import IGNORED
from lightning_cxl.sequences.packing import without_first

Batch = dict[str, Tensor]


class Samples(Protocol):
    """What a `SampleLoader` reads: a `datasets.Dataset` in the format of torch, or what looks like one."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __getitem__(self, numbers: list[int]) -> Mapping[str, Sequence[Tensor]]:
        """Return the columns of some of them."""


def collate(rows: Mapping[str, Sequence[Tensor]], pad_id: int) -> Batch:
    """Return a batch: ``input_ids`` and ``labels``, both int64 ``(samples, tokens of the longest)``.

    Shorter samples have `pad_id` behind them, without labels. A model that attends only to earlier tokens needs no
    mask for that. Rows without labels learn all their tokens. Rows with ``position_ids`` are packed, and so is the
    batch: see [Note: Packed rows].
    """
    ids = rows["input_ids"]
    labels = rows.get("labels", ids)
    batch = {
        "input_ids": pad_sequence(list(ids), batch_first=True, padding_value=pad_id),
        "labels": pad_sequence(list(labels), batch_first=True, padding_value=IGNORED),
    }
    if "position_ids" in rows:
        batch["position_ids"] = pad_sequence(list(rows["position_ids"]), batch_first=True)
        batch["labels"] = without_first(batch["labels"], batch["position_ids"])
    return batch


def scored_tokens(batch: Batch) -> int:
    """Return how many predictions of the next token the loss of a batch is the mean of."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


class SampleLoader:
    """Batches of samples; knows where it is, so that a checkpoint in the middle of an epoch resumes exactly.

    The order of an epoch depends on `seed` and the epoch's number alone. Lightning calls `set_epoch` (through
    `sampler`), stores `state_dict()` in its checkpoints and calls `load_state_dict()` before the first batch.

    Args:
        samples: Rows ``{"input_ids": int64 (tokens,)}``, with or without ``"labels"`` and ``"position_ids"`` of
            the same shape.
        batch_size: Samples in a batch; the samples that fill no whole batch are left out of the epoch.
        pad_id: Token behind samples that are shorter than the longest of their batch.
        seed: None keeps the order of `samples`.
        rank: Which of `world_size` processes this is: each reads its own share of every epoch.
        world_size: Number of processes.
    """

    batch_sampler = None  # Lightning asks every loader that has a `sampler`

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        *,
        pad_id: int = 0,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.pad_id = pad_id
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self._next_batch = 0  # of the running epoch: what a checkpoint taken now must continue with
        self._start = 0  # where the next iterator starts; not 0 only after load_state_dict()

    @property
    def sampler(self) -> "SampleLoader":
        """Where Lightning looks for `set_epoch`."""
        return self

    def __len__(self) -> int:
        return len(self.samples) // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        # a generator: epoch and start are read at the first batch, after Lightning's set_epoch()
        start, self._start = self._start, 0
        order = self._order()
        for index in range(start, len(self)):
            self._next_batch = index + 1
            rows = self.samples[order[index * self.batch_size : (index + 1) * self.batch_size]]
            yield collate(rows, self.pad_id)

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
        """Return this process's numbers of samples in the order of the epoch."""
        if self.seed is None:
            order = torch.arange(len(self.samples))
        else:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(len(self.samples), generator=generator)
        own: list[int] = order[self.rank :: self.world_size].tolist()
        return own

    def _order_key(self) -> dict[str, Any]:
        """Return what, together with the epoch's number, decides the order."""
        return {
            "num_blocks": len(self.samples),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "world_size": self.world_size,
        }
