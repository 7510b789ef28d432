"""Checkpoints of the Trainer of transformers: exact in the middle, with us and without us."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from lightning_cxl import plain_checkpoint
from tests.integration.hf_trainer import (
    EXACT,
    PLAIN,
    assert_identical,
    finish,
    make_trainer,
    only_checkpoint,
    rows,
    train,
    weights_of,
)
from tests.integration.llama import tiny_llama

HALVES = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
WARM = {"lr_scheduler_type": "cosine", "warmup_steps": 2, **HALVES}
STEP = 3  # in the middle of the first epoch, which has 4


@pytest.mark.on_cpu  # the Trainer keeps the random numbers of known devices only
def test_resumes_exactly_with_random_numbers(tmp_path):
    noise = {**WARM, "neftune_noise_alpha": 5.0}
    whole = train(tmp_path / "whole", {"stream_weights": True}, **noise)
    middle = only_checkpoint(tmp_path / "whole", tmp_path / "resumed", STEP)
    assert_identical(whole, train(tmp_path / "resumed", {"stream_weights": True}, resume=str(middle), **noise))


@pytest.mark.parametrize("options", [{}, {"stream_weights": True, "state": "8bit"}], ids=str)
def test_the_best_model_is_loaded_at_the_end(tmp_path, options):
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "save_only_model": True}
    parts = {"eval_dataset": rows(4, seed=5)}
    losses = {}
    for name, offload in (("plain", PLAIN), ("ours", options)):
        trainer = make_trainer(tmp_path / name, offload, parts=parts, **{**WARM, **best, "learning_rate": 3e-2})
        trainer.train()
        found = trainer.state.best_model_checkpoint
        weights = weights_of(trainer.model)
        losses[name] = trainer.evaluate()["eval_loss"]
        finish(trainer)
        assert trainer.state.best_metric == pytest.approx(losses[name], abs=1e-6)
        for key, value in load_file(f"{found}/model.safetensors").items():
            assert torch.equal(weights[key], value), key
    assert "optimizer.pt" not in {path.name for path in (tmp_path / "ours").rglob("*")}
    if not options:
        assert losses["ours"] == pytest.approx(losses["plain"], abs=1e-5)


@pytest.mark.parametrize("state", ["bf16", "8bit"])
def test_state_in_few_bits_goes_to_the_plain_trainer(tmp_path, state):
    large = {"hidden_size": 64, "intermediate_size": 128}  # state of small weights stays float32
    train(tmp_path / "whole", {"state": state}, model=tiny_llama(**large), **WARM)
    middle = only_checkpoint(tmp_path / "whole", tmp_path / "resumed", STEP)
    if state == "8bit":
        with pytest.raises(KeyError, match="exp_avg"):
            train(tmp_path / "resumed", resume=str(middle), model=tiny_llama(**large), **WARM)
        own = torch.load(middle / "optimizer.pt")
        whole = {
            "state_dict": load_file(middle / "model.safetensors"),
            "optimizer_states": [own],
            "lightning_cxl": own["lightning_cxl"],
        }
        torch.save(plain_checkpoint(whole)["optimizer_states"][0], middle / "optimizer.pt")
    losses, _ = train(tmp_path / "resumed", resume=str(middle), model=tiny_llama(**large), **WARM)
    exact, _ = train(tmp_path / "exact", model=tiny_llama(**large), **WARM)
    assert [loss for loss, *_ in losses] == pytest.approx([loss for loss, *_ in exact], abs=2e-3)


def adapted():
    torch.manual_seed(4)
    return get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft asks for it
def test_adapters_train_are_saved_and_resume(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    parts = {"eval_dataset": rows(4, seed=5)}
    found = []
    for name, options in (("plain", PLAIN), ("ours", {"stream_weights": True, **EXACT})):
        found.append(train(tmp_path / name, options, model=adapted(), parts=parts, **WARM, **best))
    assert_identical(*found)
    whole = train(tmp_path / "whole", {"stream_weights": True}, model=adapted(), **WARM)
    middle = only_checkpoint(tmp_path / "whole", tmp_path / "resumed", STEP)
    resumed = train(tmp_path / "resumed", {"stream_weights": True}, resume=str(middle), model=adapted(), **WARM)
    assert_identical(whole, resumed)
    assert (middle / "adapter_model.safetensors").exists()
