"""Adapters by `peft`: frozen weights stream, adapters train, and what peft does with both afterwards works."""

import pytest
import torch

from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import EXACT, assert_identical, offload, train

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("late_copies")
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
CONFIGS = {
    "lora": lambda: peft.LoraConfig(**LORA),
    "lora, outer layer trained": lambda: peft.LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "lora, one layer": lambda: peft.LoraConfig(**LORA, layers_to_transform=[1]),
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def adapted(kind):
    model = tiny_llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, CONFIGS[kind]())


def run(strategy, kind="lora", **arguments):
    model = adapted(kind)
    return model, train(lambda: model, strategy, task=LlamaTask, steps=5, **arguments)


@pytest.mark.parametrize(
    ("kind", "streams"), [*((kind, True) for kind in CONFIGS), ("lora", False), ("prefix tuning", False)]
)
def test_is_the_plain_run(kind, streams):
    (_, plain), (_, ours) = run("auto", kind), run(offload(stream_weights=streams, **EXACT), kind)
    assert_identical(plain, ours)
    assert len(set(plain[0])) == 5
