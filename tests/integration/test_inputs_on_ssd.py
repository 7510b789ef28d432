"""Inputs of units on SSD: training is that of inputs in memory, bit for bit."""

import os

import pytest
import torch

from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import offload, train

INPUTS = {"*": {"activations": "ssd"}}
ALL = {"*": {"weights": "ssd", "optimizer_state": "ssd", "activations": "ssd"}}
STEPS = 6


def on_ssd(folder, rules=INPUTS, **options):
    ssd = {"path": str(folder), "budget": "64MiB", **options.pop("ssd", {})}
    return offload(**{"tiers": {"ssd": ssd}, "tier_rules": rules, **options})


def both(tmp_path, make_model=tiny_llama, rules=INPUTS, **options):
    given = {key: options.pop(key) for key in ("optimizer", "optimizer_args", "trainer_args", "task") if key in options}
    given.setdefault("task", LlamaTask)
    strategy = on_ssd(tmp_path / "ssd", rules, **options)
    ours = train(make_model, strategy, steps=STEPS, **given)
    theirs = train(make_model, offload(**options), steps=STEPS, **given)
    assert_same(ours, theirs)
    return strategy


def assert_same(ours, theirs):
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    for name in ours[1]:
        assert torch.equal(ours[1][name], theirs[1][name]), name


@pytest.mark.parametrize("rules", [INPUTS, ALL], ids=["inputs", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stream", [False, True], ids=["weights stay", "weights stream"])
def test_training_is_that_of_inputs_in_memory(tmp_path, rules, dtype, stream):
    def make_model():
        return tiny_llama(4).to(dtype)

    strategy = both(tmp_path, make_model, rules, stream_weights=stream)
    report = strategy.report()
    print(report["tiers"]["ssd"], report["planned_roles"], report["peak_roles"], report["ssd"])
    assert os.listdir(tmp_path / "ssd") == ["lightning_cxl.lock"]
