"""Checkpoints that an earlier version wrote go on exactly as they did in it.

Files in ``tests/fixtures/checkpoints``: ``NAME.ckpt`` after three steps, ``NAME.after.pt`` the weights two steps later,
both written by this module as it is in commit 24bfae0, run as a program: those of `ON_SSD` and the folder of two ranks
with the package of commit 0aefe67, the others with that of 8ba3d6c. One that refers to state on SSD lies beside its
drive in a folder (``ssd_reference``), which can be read only where it was written: `WRITTEN_AT`. Gradients are numbers
that bfloat16 holds exactly, so that the result depends on no matrix product and, with our update, on no CPU. torch's
AdamW takes roots and divides in another order on another CPU: it may be an ulp off.
"""

import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from tests.integration.training import make_trainer

pytestmark = [pytest.mark.on_cpu, pytest.mark.every_case]

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
ON_SSD = {
    "ssd_copy": {"checkpoint": "copy"},
    "ssd_copy_split_8bit": {"checkpoint": "copy", "precision": "bf16-true", "state": "8bit", "size": 64},
}
REFERENCE = "ssd_reference"
WRITTEN_AT = Path("/var/tmp/lightning_cxl_earlier_checkpoint")
SHARDED = "two_ranks"


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


def run(name: str, ckpt_path: Path, drive: Path | None = None) -> Task:
    """Train to the fifth step."""
    options = dict((CASES | ON_SSD | {SHARDED: {}, REFERENCE: {"checkpoint": "reference"}})[name])
    size, precision = options.pop("size", 16), options.pop("precision", "32-true")
    if drive is not None:
        ssd = {"path": str(drive), "budget": "1MiB", "checkpoint": options.pop("checkpoint")}
        options |= {"tiers": {"ssd": ssd}, "tier_rules": {"*": {"optimizer_state": "ssd"}}}
    accumulate = options.pop("accumulate_grad_batches", 1)
    trainer = make_trainer(options, precision=precision, max_steps=5, accumulate_grad_batches=accumulate)
    task = Task(size)
    trainer.fit(task, ckpt_path=ckpt_path)
    assert trainer.global_step == 5
    return task


def assert_reached(task: Task, name: str, near: bool = False) -> None:
    after = torch.load(FOLDER / f"{name}.after.pt")
    for key, value in task.state_dict().items():
        assert value.dtype == after[key].dtype
        if near:
            torch.testing.assert_close(value, after[key], rtol=2**-23, atol=2**-30)
        else:
            assert torch.equal(value, after[key]), key


@pytest.mark.parametrize("name", CASES)
def test_it_reaches_the_same_weights(name):
    before = torch.load(FOLDER / f"{name}.ckpt")["state_dict"]
    task = run(name, FOLDER / f"{name}.ckpt")
    assert_reached(task, name, near="torch" in name)
    assert not any(torch.equal(before[key], value) for key, value in task.state_dict().items())


@pytest.mark.parametrize("name", ON_SSD)
def test_state_on_ssd_goes_on(tmp_path, name):
    task = run(name, FOLDER / f"{name}.ckpt", tmp_path)
    assert_reached(task, name)


def test_a_checkpoint_that_refers_to_state_on_ssd_goes_on():
    shutil.rmtree(WRITTEN_AT, ignore_errors=True)
    shutil.copytree(FOLDER / REFERENCE, WRITTEN_AT)
    try:
        task = run(REFERENCE, WRITTEN_AT / "a.ckpt", WRITTEN_AT / "drive")
        assert_reached(task, REFERENCE)
    finally:
        shutil.rmtree(WRITTEN_AT)


def test_the_folder_of_two_ranks_goes_on_in_one_process():
    task = run(SHARDED, FOLDER / f"{SHARDED}.ckpt")
    assert_reached(task, SHARDED)
