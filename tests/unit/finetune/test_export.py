import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_cxl import CXLOffloadStrategy
from lightning_cxl.__main__ import main
from lightning_cxl.finetune.export import ExportPretrained


def test_an_export_loads_in_transformers_with_equal_weights_and_tokenizer(tiny_model, data, make_trainer, tmp_path):
    make_trainer(max_steps=2, callbacks=[ExportPretrained(str(tmp_path / "out"))]).fit(tiny_model, data)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained = tiny_model.model.state_dict()
    assert loaded.state_dict().keys() == trained.keys()
    assert all(torch.equal(value, trained[name]) for name, value in loaded.state_dict().items())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("word1 word2")["input_ids"] == data.tokenizer("word1 word2")["input_ids"]
    assert loaded.config.eos_token_id == tokenizer.eos_token_id == data.tokenizer.eos_token_id


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "tiers": {"ssd": {"path": "ssd", "budget": "1GiB", "checkpoint": "reference"}},
            "tier_rules": {"*": {"optimizer_state": "ssd"}},
        },
    ],
    ids=["in memory", "refers to SSD"],
)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_checkpoint_of_a_run_exports_by_itself(
    tiny_model, data, make_trainer, tmp_path, monkeypatch, precision, options
):
    monkeypatch.chdir(tmp_path)
    strategy = CXLOffloadStrategy(**options)
    trainer = make_trainer(max_steps=2, strategy=strategy, accelerator="auto", precision=precision)
    trainer.fit(tiny_model, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    monkeypatch.setattr(sys, "argv", ["lightning_cxl", "export", "last.ckpt", "out"])
    main()
    expected = torch.load(tmp_path / "last.ckpt")["state_dict"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == (torch.float32 if precision == "32-true" else torch.bfloat16)
    assert {f"model.{name}" for name in loaded.state_dict()} == expected.keys()
    assert all(torch.equal(value, expected[f"model.{name}"]) for name, value in loaded.state_dict().items())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == data.tokenizer.get_vocab()
