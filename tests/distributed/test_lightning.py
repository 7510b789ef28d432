"""Several processes under Lightning: as one process, with checkpoints that any number of processes goes on from."""

import os
import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed import lightning_runs
from tests.distributed.lightning_runs import Module, Result
from tests.distributed.training import place, whole


def run(ranks, world, *args, **keywords):
    """Return what rank 0 has of a run of `world` ranks; of one in this process."""
    if world == 1:
        return lightning_runs.fit(*args, **keywords)
    results = ranks.of(world).run(lightning_runs.fit, *args, **keywords)
    for each in results[1:]:
        assert each["losses"] == results[0]["losses"]
        for name, weights in each["weights"].items():
            assert torch.equal(weights, results[0]["weights"][name]), name
    return results[0]


def assert_close(one, other, limit=1e-6):
    assert one["losses"] == pytest.approx(other["losses"], rel=limit)
    for name, weights in one["weights"].items():
        assert (weights.float() - other["weights"][name].float()).abs().max() <= limit, name


def assert_identical(one, other):
    assert one["losses"] == other["losses"]
    for name, weights in one["weights"].items():
        assert torch.equal(weights, other["weights"][name]), name


CASES = {
    "accumulated and clipped": {"trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}},
    "parameters of the module itself": {"module": {"own": True}},
    "manual optimization": {"module": {"manual": True}},
    "evaluated before and meanwhile": {"evaluate": True, "trainer": {"limit_val_batches": 1, "val_check_interval": 2}},
    "models called by a method": {"module": {"by_method": True}},
}


@pytest.mark.parametrize(("name", "world"), [*((name, 2) for name in CASES), ("accumulated and clipped", 4)])
def test_several_processes_train_as_one(ranks, world, name):
    assert_close(run(ranks, world, 4, **CASES[name]), run(ranks, 1, 4, **CASES[name]))


STATES = {
    "float32": {},
    "bf16 with split masters": {"trainer": {"precision": "bf16-true"}},
    "bf16 with float32 masters": {"trainer": {"precision": "bf16-true"}, "options": {"master": "fp32"}},
    "bf16 state": {"options": {"state": "bf16"}},
    "8 bit state": {"options": {"state": "8bit"}},
    "another optimizer": {"module": {"optimizer": "SGD"}},
}


@pytest.mark.parametrize("state", ["bf16 with split masters", "bf16 state", "8 bit state", "another optimizer"])
def test_resume_is_exact_where_the_number_of_processes_stays(ranks, tmp_path, state):
    path = str(tmp_path / "half.ckpt")
    whole = run(ranks, 2, 6, **STATES[state])
    run(ranks, 2, 3, save=path, **STATES[state])
    rest = run(ranks, 2, 6, resume=path, **STATES[state])
    assert_identical(rest, {**whole, "losses": whole["losses"][3:]})


RESHARDED = [
    (2, 1, "float32"),
    (2, 1, "8 bit state"),
    (1, 2, "8 bit state"),
    (4, 2, "bf16 with split masters"),
    (2, 4, "bf16 with float32 masters"),
    (1, 4, "another optimizer"),
]


@pytest.mark.parametrize("before, after, state", RESHARDED)
def test_another_number_of_processes_goes_on(ranks, tmp_path, before, after, state):
    path = str(tmp_path / "half.ckpt")
    run(ranks, before, 3, save=path, **STATES[state])
    rest = run(ranks, after, 6, resume=path, **STATES[state])
    whole = run(ranks, before, 6, **STATES[state])
    limit = 1e-6 if state in ("float32", "another optimizer") else 2e-3  # roundings differ with the order of sums
    assert_close(rest, {**whole, "losses": whole["losses"][3:]}, limit)


def test_one_process_saves_where_several_have_saved(ranks, tmp_path):
    path = tmp_path / "last.ckpt"
    run(ranks, 2, 3, save=str(path))
    saved = run(ranks, 1, 4, resume=str(path), save=str(path))
    assert path.is_file() and os.listdir(tmp_path) == ["last.ckpt"]
    assert_identical(run(ranks, 1, 4, resume=str(path)), {**saved, "losses": []})


def told_with(plugin):
    """Save with a plug-in for files; return what was said of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lightning_runs.fit(1, trainer={"plugins": [plugin]})
    return [str(each.message) for each in caught if "writes no checkpoints here" in str(each.message)]


def test_a_plug_in_that_is_not_asked_is_named(ranks):
    first, second = ranks.of(2).run(told_with, AsyncCheckpointIO(TorchCheckpointIO()))
    assert len(first) == 1 and first[0].startswith("TorchCheckpointIO writes no checkpoints here: 2 processes")
    assert second == []
    assert ranks.of(2).run(told_with, AsyncCheckpointIO()) == [[], []]


# -- folders of plain Lightning's `ModelParallelStrategy`


PLAIN_JOB = {"llama": True}
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
    task = Cut(**PLAIN_JOB)
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
    fits = {"plain": fit_plain, "ours": partial(lightning_runs.fit, module=PLAIN_JOB)}
    path, pool = str(tmp_path / "half.ckpt"), ranks.of(2)
    expected = pool.run(fit_plain, 6)[0]
    pool.run(fits[first], 3, save=path)
    rest = pool.run(fits[second], 6, resume=path)[0]
    assert rest["losses"] == pytest.approx(expected["losses"][3:], rel=1e-6)
    for name, weights in rest["weights"].items():
        assert (weights - expected["weights"][name]).abs().max() <= 1e-6, name
