import os
from functools import partial

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

from lightning_cxl.commands.export import export_checkpoint
from lightning_cxl.errors import CheckpointError
from tests.distributed import lightning_runs
from tests.distributed.lightning_runs import Module
from tests.distributed.ranks import gone_on, of_rank_0
from tests.distributed.training import assert_close, assert_identical, assert_same_weights, place
from tests.integration.llama import tiny_llama


def run(ranks, world, *args, **keywords):
    return of_rank_0(ranks, world, lightning_runs.fit, *args, **keywords)


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
    assert_identical(*gone_on(ranks, lightning_runs.fit, 2, 2, str(tmp_path / "half.ckpt"), **STATES[state]))


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
    rest, whole = gone_on(ranks, lightning_runs.fit, before, after, str(tmp_path / "half.ckpt"), **STATES[state])
    limit = 1e-6 if state in ("float32", "another optimizer") else 2e-3  # roundings differ with the order of sums
    assert_close(rest, whole, limit)


def test_one_process_saves_where_several_have_saved(ranks, tmp_path):
    path = tmp_path / "last.ckpt"
    run(ranks, 2, 3, save=str(path))
    saved = run(ranks, 1, 4, resume=str(path), save=str(path))
    assert path.is_file() and os.listdir(tmp_path) == ["last.ckpt"]
    assert_identical(run(ranks, 1, 4, resume=str(path)), {**saved, "losses": []})


PLAIN_JOB = {"llama": True}
"""All its weights get gradients: plain Lightning cannot resume, also from its own folders, where one never got any."""


class Cut(Module):
    """Cuts its model as Lightning asks its users to."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def fit_plain(steps, **keywords):
    trainer = {"strategy": ModelParallelStrategy(place()[1], 1)}
    return lightning_runs.fit(steps, kind=Cut, module=PLAIN_JOB, trainer=trainer, **keywords)


@pytest.mark.parametrize("first, second", [("plain", "ours"), ("ours", "plain")])
def test_one_goes_on_where_the_other_stopped(ranks, tmp_path, first, second):
    fits = {"plain": fit_plain, "ours": partial(lightning_runs.fit, module=PLAIN_JOB)}
    path, pool = str(tmp_path / "half.ckpt"), ranks.of(2)
    expected = pool.run(fit_plain, 6)[0]
    pool.run(fits[first], 3, save=path)
    rest = pool.run(fits[second], 6, resume=path)[0]
    assert_close(rest, {**expected, "losses": expected["losses"][3:]})


MASTERS = {"split": {}, "whole": {"master": "fp32"}}


@pytest.mark.parametrize("masters", MASTERS)
def test_a_folder_is_exported_as_a_file(ranks, tmp_path, masters):
    folder, file, base = (tmp_path / name for name in ("folder.ckpt", "file.ckpt", "base"))
    job = {"module": {"llama": True}, "trainer": {"precision": "bf16-true"}, "options": MASTERS[masters]}
    ranks.of(2).run(lightning_runs.fit, 3, save=str(folder), **job)
    lightning_runs.fit(3, resume=str(folder), save=str(file), **job)  # no step: the state only changes its form
    assert folder.is_dir() and file.is_file()
    model = tiny_llama(tie_word_embeddings=True).bfloat16()
    model.save_pretrained(base)
    written = {}
    for dtype in (None, torch.float32):
        for source in (folder, file):
            out = tmp_path / f"{source.stem} {dtype}"
            exported = export_checkpoint(source, out, base=base, dtype=dtype)
            assert ("are the float32 master weights" in " ".join(exported.notes)) is (dtype is torch.float32)
            written[source, dtype] = load_file(out / "model.safetensors")
        ours, expected = written[folder, dtype], written[file, dtype]
        assert_same_weights(ours, expected)
    narrow, wide = written[folder, None], written[folder, torch.float32]
    assert sum(int((wide[name] != narrow[name].float()).sum()) for name in wide) > 1000


def test_a_state_of_accelerate_is_exported_from_its_newer_part(ranks, tmp_path):
    """`load_state` takes what several processes have written, too, if files of one lie beside it."""
    state, base = tmp_path / "state", tmp_path / "base"
    ranks.of(2).run(lightning_runs.fit, 1, save=str(state / "sharded_model_0"), module={"llama": True})
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(base)
    (state / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    export_checkpoint(state, tmp_path / "out", base=base)
    export_checkpoint(state / "sharded_model_0", tmp_path / "expected", base=base)
    found, expected, older = (
        load_file(each / "model.safetensors") for each in (tmp_path / "out", tmp_path / "expected", base)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not all(torch.equal(found[name], older[name]) for name in older)
    ranks.of(2).run(lightning_runs.fit, 1, save=str(state / "sharded_model_1"), module={"llama": True})
    with pytest.raises(CheckpointError, match=r"several models: export one of .*sharded_model_1"):
        export_checkpoint(state, tmp_path / "out 2", base=base)
