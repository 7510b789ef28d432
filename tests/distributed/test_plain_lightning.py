"""Folders of plain Lightning's `ModelParallelStrategy` are read, and it reads ours."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed import lightning_runs
from tests.distributed.lightning_runs import Module, Result
from tests.distributed.training import place, whole

JOB = {"llama": True}
"""All its weights get gradients: plain Lightning cannot resume, also from its own folders, where one never got any."""


class Cut(Module):
    """Cuts its model as Lightning asks its users to."""

    def configure_model(self) -> None:
        """Cut each block, then the rest."""
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def fit_plain(steps, *, resume=None, save=None):
    """Train without us."""
    _, world = place()
    seed_everything(5, verbose=False)
    task = Cut(**JOB)
    trainer = Trainer(
        accelerator="cpu", devices=world, max_steps=steps, max_epochs=-1, use_distributed_sampler=False,
        strategy=ModelParallelStrategy(world, 1), logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, DataLoader(TensorDataset(torch.arange(64))), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return Result(losses=task.losses, weights={name: whole(value) for name, value in task.named_parameters()})


@pytest.mark.parametrize("first, second", [("plain", "ours"), ("ours", "plain")])
def test_one_goes_on_where_the_other_stopped(ranks, tmp_path, first, second):
    fits = {"plain": fit_plain, "ours": partial(lightning_runs.fit, module=JOB)}
    path, pool = str(tmp_path / "half.ckpt"), ranks.of(2)
    expected = pool.run(fit_plain, 6)[0]
    pool.run(fits[first], 3, save=path)
    rest = pool.run(fits[second], 6, resume=path)[0]
    assert rest["losses"] == pytest.approx(expected["losses"][3:], rel=1e-6)
    for name, weights in rest["weights"].items():
        assert (weights - expected["weights"][name]).abs().max() <= 1e-6, name
