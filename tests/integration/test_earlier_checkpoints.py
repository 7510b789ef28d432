"""Checkpoints that an earlier version wrote go on exactly as they did in it.

Files in ``tests/fixtures/checkpoints``: ``NAME.ckpt`` after three steps, ``NAME.after.pt`` the weights two steps later,
both written by commit 8ba3d6c with ``python tests/integration/test_earlier_checkpoints.py``. Gradients are numbers that
bfloat16 holds exactly, so that the result depends on no matrix product and, with our update, on no CPU. torch's AdamW
takes roots and divides in another order on another CPU: it may be an ulp off.
"""

import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

import lightning_cxl

pytestmark = pytest.mark.on_cpu

FOLDER = Path(__file__).parents[1] / "fixtures" / "checkpoints"
CASES = {
    "fp32": {},
    "torch_adamw": {"cpu_adam": False},
    "bf16_split": {"precision": "bf16-true"},
    "bf16_masters": {"precision": "bf16-true", "master": "fp32"},
    "bf16_mixed_state_bf16": {"precision": "bf16-mixed", "state": "bf16", "size": 64},
    "bf16_split_state_8bit": {"precision": "bf16-true", "state": "8bit", "size": 64},
    "bf16_sums_bf16": {"precision": "bf16-true", "accumulate": "bf16", "accumulate_grad_batches": 3},
}


class Task(LightningModule):
    """Two weights whose gradients are known numbers, another pattern in every micro-batch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((pattern(size * size, 5) / 8).view(size, size))
        self.bias = nn.Parameter(pattern(size, 7))

    def training_step(self, batch, batch_idx):
        salt = 10 * self.global_step + batch_idx % 3
        parts = [p * pattern(p.numel(), salt + k).view(p.shape).to(p.dtype) for k, p in enumerate(self.parameters())]
        return sum(part.sum() for part in parts)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(1000))


def pattern(count: int, salt: int) -> torch.Tensor:
    return ((torch.arange(count) * 37 + salt * 11) % 101 - 50) / 64


def run(name: str, steps: int, ckpt_path: Path | None = None) -> tuple[Task, Trainer]:
    options = dict(CASES[name])
    size, precision = options.pop("size", 16), options.pop("precision", "32-true")
    trainer = Trainer(
        accelerator="cpu", precision=precision, max_steps=steps, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=options.pop("accumulate_grad_batches", 1),
        strategy=lightning_cxl.CXLOffloadStrategy(**options),
    )  # fmt: skip
    task = Task(size)
    trainer.fit(task, ckpt_path=ckpt_path)
    return task, trainer


@pytest.mark.parametrize("name", CASES)
def test_it_reaches_the_same_weights(name):
    after = torch.load(FOLDER / f"{name}.after.pt")
    before = torch.load(FOLDER / f"{name}.ckpt")["state_dict"]
    task, trainer = run(name, 5, FOLDER / f"{name}.ckpt")
    assert trainer.global_step == 5
    for key, value in task.state_dict().items():
        assert value.dtype == after[key].dtype
        if "torch" in name:
            torch.testing.assert_close(value, after[key], rtol=2**-23, atol=2**-30)
        else:
            assert torch.equal(value, after[key]), key
        assert not torch.equal(before[key], after[key])


def write() -> None:
    """Write the files, and check that a run without a stop ends at the same weights."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in CASES:
        _, trainer = run(name, 3)
        trainer.save_checkpoint(FOLDER / f"{name}.ckpt")
        straight, _ = run(name, 5)
        resumed, _ = run(name, 5, FOLDER / f"{name}.ckpt")
        for key, value in straight.state_dict().items():
            assert torch.equal(value, resumed.state_dict()[key]), (name, key)
        torch.save(resumed.state_dict(), FOLDER / f"{name}.after.pt")


if __name__ == "__main__":
    sys.exit(write())
