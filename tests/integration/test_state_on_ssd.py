"""Optimizer state on SSD: training is that of state in memory, bit for bit, on every device and in every precision."""

import os
from pathlib import Path

import pytest
import torch

from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import make_trainer, offload, train
from tests.models import token_data

RULE = {"*": {"optimizer_state": "ssd"}}
STEPS = 6


def on_ssd(folder: Path, **options):
    ssd = {"path": str(folder), "budget": "64MiB", **options.pop("ssd", {})}
    return offload(tiers={"ssd": ssd, **options.pop("tiers", {})}, **{"tier_rules": RULE, **options})


def both(tmp_path, make_model=tiny_llama, **options):
    given = {key: options.pop(key) for key in ("optimizer", "optimizer_args", "trainer_args") if key in options}
    strategy = on_ssd(tmp_path / "ssd", **options)
    ours = train(make_model, strategy, steps=STEPS, task=LlamaTask, **given)
    theirs = train(make_model, offload(**options), steps=STEPS, task=LlamaTask, **given)
    return strategy, ours, theirs


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    for name in ours[1]:
        assert torch.equal(ours[1][name], theirs[1][name]), name


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overlap", [False, True], ids=["whole", "overlap"])
def test_training_is_that_of_state_in_memory(tmp_path, state, dtype, overlap):
    def make_model():
        return tiny_llama(hidden_size=64, intermediate_size=128).to(dtype)

    strategy, ours, theirs = both(
        tmp_path, make_model, state=state, stream_weights=overlap, overlap_step=overlap, on_overflow="ignore"
    )
    assert_same(ours, theirs)
    roles = strategy.report()["peak_roles"]
    assert not {"momentum", "variance"} & roles.keys(), "state was in memory"
    assert strategy.report()["tiers"]["ssd"]["peak_bytes"] > 0
    assert os.listdir(tmp_path / "ssd") == ["lightning_cxl.lock"]
