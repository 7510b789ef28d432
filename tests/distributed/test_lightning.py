"""Several processes under Lightning: as one process, with checkpoints that any number of processes goes on from."""

import os
import warnings

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from tests.distributed import lightning_runs

PLAIN = {"lightning": {"trainer": {"strategy": "auto"}}}


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
    "plain": {},
    "accumulated and clipped": {"trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}},
    "parameters of the module itself": {"module": {"own": True}},
    "manual optimization": {"module": {"manual": True}},
    "another optimizer": {"module": {"optimizer": "SGD"}, "trainer": {"gradient_clip_val": 0.5}},
    "evaluated before and meanwhile": {"evaluate": True, "trainer": {"limit_val_batches": 1, "val_check_interval": 2}},
    "models called by a method": {"module": {"by_method": True}},
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
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


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_resume_is_exact_where_the_number_of_processes_stays(ranks, tmp_path, world, state):
    path = str(tmp_path / "half.ckpt")
    whole = run(ranks, world, 6, **STATES[state])
    run(ranks, world, 3, save=path, **STATES[state])
    rest = run(ranks, world, 6, resume=path, **STATES[state])
    assert_identical(rest, {**whole, "losses": whole["losses"][3:]})


def resharded():
    """Yield each pair of numbers of ranks with each state; those that others show, too, are marked ``full``."""
    for state in STATES:
        for before, after in ((2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (1, 4)):
            shown = state == "float32" or (before, after) in ((2, 1), (1, 2)) or (state, before) == ("8 bit state", 4)
            marks = () if shown else pytest.mark.full
            yield pytest.param(before, after, state, id=f"{before} to {after}, {state}", marks=marks)


@pytest.mark.parametrize("before, after, state", list(resharded()))
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
        lightning_runs.fit(1, trainer={"plugins": [plugin] if plugin else []})
    return [str(each.message) for each in caught if "writes no checkpoints here" in str(each.message)]


@pytest.mark.parametrize("plugin", [TorchCheckpointIO(), AsyncCheckpointIO(TorchCheckpointIO())])
def test_a_plug_in_that_is_not_asked_is_named(ranks, plugin):
    first, second = ranks.of(2).run(told_with, plugin)
    assert len(first) == 1 and first[0].startswith("TorchCheckpointIO writes no checkpoints here: 2 processes")
    assert second == []


@pytest.mark.parametrize("plugin", [None, AsyncCheckpointIO()])
def test_nothing_is_said_of_others(ranks, plugin):
    assert ranks.of(2).run(told_with, plugin) == [[], []]
