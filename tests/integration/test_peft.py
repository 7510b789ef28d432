"""Adapters by `peft`: frozen weights stream, adapters train, and what peft does with both afterwards works."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from tests import training_device
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import EXACT, assert_equal, assert_identical, offload, train

peft = pytest.importorskip("peft")
safetensors = pytest.importorskip("safetensors.torch")
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


@pytest.mark.parametrize("options", [EXACT, {"on_overflow": "ignore"}], ids=["torch AdamW", "updates behind"])
def test_merging_and_unmerging_between_steps(options):
    """As one does to evaluate."""

    def merges(trainer, module, *_):
        module.model.merge_adapter()
        module.model.unmerge_adapter()

    arguments = {"trainer_args": {"callbacks": [LambdaCallback(on_train_batch_end=merges)]}}
    _, expected = run("auto" if options is EXACT else offload(overlap_step=False), **arguments)
    _, ours = run(offload(**options), **arguments)
    if options is EXACT and training_device.chosen.type == "cuda":
        # ours merges on the host, whose products round otherwise
        torch.testing.assert_close(ours[1], expected[1], rtol=1e-4, atol=1e-6)
    else:
        assert_identical(expected, ours)


def test_adapters_are_saved_during_and_after_the_run(tmp_path):
    for name, strategy in {"plain": offload(overlap_step=False), "ours": offload(on_overflow="ignore")}.items():

        def saves(trainer, module, *_, folder=tmp_path / name):
            module.model.save_pretrained(folder / str(trainer.global_step))

        model, _ = run(strategy, trainer_args={"callbacks": [LambdaCallback(on_train_batch_end=saves)]})
        model.save_pretrained(tmp_path / name / "end")
    for step in ("1", "3", "end"):
        files = [tmp_path / name / step / "adapter_model.safetensors" for name in ("plain", "ours")]
        assert_equal(*map(safetensors.load_file, files))
        assert files[1].stat().st_size < 20_000  # the adapters alone, not the memory that they lie in
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "ours" / "end")
    tokens = torch.arange(8)[None]
    assert_equal(*(each.eval()(input_ids=tokens).logits for each in (loaded, model)))
