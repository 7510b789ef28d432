"""Weights of units on SSD: training is that of weights in memory, bit for bit, on every device and in every precision."""

import os

import pytest
import torch

from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import offload, train

WEIGHTS = {"*": {"weights": "ssd"}}
ALL = {"*": {"weights": "ssd", "optimizer_state": "ssd"}}
STEPS = 6


def on_ssd(folder, rules=ALL, **options):
    ssd = {"path": str(folder), "budget": "64MiB", **options.pop("ssd", {})}
    return offload(**{"tiers": {"ssd": ssd}, "tier_rules": rules, "stream_weights": True, **options})


def both(tmp_path, make_model=tiny_llama, rules=ALL, **options):
    given = {key: options.pop(key) for key in ("optimizer", "optimizer_args", "trainer_args", "task") if key in options}
    given.setdefault("task", LlamaTask)
    strategy = on_ssd(tmp_path / "ssd", rules, **options)
    ours = train(make_model, strategy, steps=STEPS, **given)
    theirs = train(make_model, offload(stream_weights=True, **options), steps=STEPS, **given)
    assert_same(ours, theirs)
    return strategy


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    for name in ours[1]:
        assert torch.equal(ours[1][name], theirs[1][name]), name


@pytest.mark.parametrize("rules", [WEIGHTS, ALL], ids=["weights", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("overlap", [False, True], ids=["whole", "overlap"])
def test_training_is_that_of_weights_in_memory(tmp_path, rules, dtype, overlap):
    def make_model():
        return tiny_llama(hidden_size=64, intermediate_size=128).to(dtype)

    strategy = both(tmp_path, make_model, rules, overlap_step=overlap, on_overflow="ignore")
    assert strategy.report()["tiers"]["ssd"]["peak_bytes"] > 0
    assert os.listdir(tmp_path / "ssd") == ["lightning_cxl.lock"]
