"""Adapters by `peft`: frozen weights stream, adapters train, and what peft does with both afterwards works."""

import pytest
import torch
from lightning.pytorch import Callback

from tests import training_device
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import EXACT, assert_identical, offload, train

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


def adapted(kind="lora"):
    model = tiny_llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, CONFIGS[kind]())


def run(strategy, kind="lora", **arguments):
    """Train; returns the adapted model and (losses, state)."""
    made = []

    def make():
        made.append(adapted(kind))
        return made[0]

    result = train(make, strategy, task=LlamaTask, **{"steps": 5, **arguments})
    return made[0], result


@pytest.mark.parametrize(
    ("kind", "streams"), [*((kind, True) for kind in CONFIGS), ("lora", False), ("prefix tuning", False)]
)
def test_is_the_plain_run(kind, streams):
    (_, plain), (_, ours) = run("auto", kind), run(offload(stream_weights=streams, **EXACT), kind)
    assert_identical(plain, ours)
    assert len(set(plain[0])) == 5


def test_frozen_weights_stream_and_have_no_gradients():
    strategy = offload(**EXACT)
    model, _ = run(strategy, trainer_args={"accumulate_grad_batches": 2})
    report = strategy.report()
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report["num_trainable"] == adapters < report["num_parameters"] / 10
    assert report["planned_roles"]["compute_grads"] == {"dram": 4 * adapters}
    assert sum(report["peak_roles"]["compute_grads"].values()) <= 2 * 4 * adapters
    assert [name.rpartition(".")[0] for name in report["units"]] == ["model.base_model.model.model.layers"] * 3


class MergesInBetween(Callback):
    """Merges the adapters into the base weights for a while, as one does to evaluate."""

    def on_train_batch_end(self, trainer, module, *_):
        module.model.merge_adapter()
        module.model.unmerge_adapter()


class Saves(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, module, *_):
        module.model.save_pretrained(self.folder / str(trainer.global_step))


@pytest.mark.parametrize("options", [EXACT, {"on_overflow": "ignore"}], ids=["torch AdamW", "updates behind"])
def test_merging_and_unmerging_between_steps(options):
    plain = {} if options is EXACT else {"overlap_step": False}
    arguments = {"trainer_args": {"callbacks": [MergesInBetween()]}}
    _, expected = run("auto" if options is EXACT else offload(**plain), **arguments)
    _, ours = run(offload(**options), **arguments)
    if (
        options is EXACT and training_device.chosen.type == "cuda"
    ):  # ours merges on the host, whose products round otherwise
        torch.testing.assert_close(ours[1], expected[1], rtol=1e-4, atol=1e-6)
    else:
        assert_identical(expected, ours)


def test_adapters_are_saved_during_and_after_the_run(tmp_path):
    for name, strategy in {"plain": offload(overlap_step=False), "ours": offload(on_overflow="ignore")}.items():
        model, _ = run(strategy, trainer_args={"callbacks": [Saves(tmp_path / name)]})
        model.save_pretrained(tmp_path / name / "end")
    for step in ("1", "3", "end"):
        files = [tmp_path / name / step / "adapter_model.safetensors" for name in ("plain", "ours")]
        expected, ours = (safetensors.load_file(file) for file in files)
        assert files[1].stat().st_size < 20_000  # the adapters alone, not the memory that they lie in
        assert ours.keys() == expected.keys() and ours
        assert all(torch.equal(ours[name], value) for name, value in expected.items())
    loaded = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / "ours" / "end")
    trained = model.eval()(input_ids=torch.arange(8)[None]).logits
    assert torch.equal(loaded.eval()(input_ids=torch.arange(8)[None]).logits, trained)
