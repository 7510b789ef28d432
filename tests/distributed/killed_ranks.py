"""A program that trains in two processes, saves a folder at every step, and goes on from the last one.

Each process writes its number to a file. Losses go to a file line by line, of each start after those before.
"""

import json
import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.lightning_runs import Module
from tests.distributed.training import whole_weights
from tests.integration.training import make_trainer


class Recording(Module):
    """Tells who it is, which step it is in, and what came of it."""

    folder: Path

    def on_train_start(self) -> None:
        own = self.folder / f"{self.global_rank}.pid"
        own.with_suffix(".new").write_text(str(os.getpid()))
        own.with_suffix(".new").rename(own)

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        if self.global_rank == 0:
            with (self.folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps([self.global_step, self.losses[-1].hex()]) + "\n")


def main(folder: Path, steps: int, *, asynchronous: bool) -> None:
    """Train up to a step, from the last checkpoint that there is."""
    torch.set_num_threads(1)
    seed_everything(5, verbose=False)
    module = Recording()
    module.folder = folder
    saving = ModelCheckpoint(
        folder / "checkpoints", "{step}", monitor="step", mode="max", save_top_k=2, save_last=True,
        every_n_train_steps=1,
    )  # fmt: skip
    trainer = make_trainer(
        {"tiers": {"dram": "1GiB"}}, devices=2, max_steps=steps, use_distributed_sampler=False, callbacks=[saving],
        enable_checkpointing=True, plugins=[AsyncCheckpointIO()] if asynchronous else [],
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(64))), ckpt_path="last")
    weights = whole_weights(module)
    if trainer.is_global_zero:
        torch.save(weights, folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), asynchronous="asynchronous" in sys.argv)
