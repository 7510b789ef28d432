"""`export --dtype float32` of runs with bfloat16 weights, of every front end: master weights, not what was rounded."""

import json

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lightning_cxl
from lightning_cxl.commands.export import export_checkpoint
from lightning_cxl.errors import ConfigError
from tests.cases import every_value
from tests.integration import accelerate_loop, hf_trainer
from tests.integration.fabric_loop import make_fabric
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import make_trainer, offload
from tests.models import token_data

STEPS = 4
OPTIONS = {"split": {}, "whole": {"master": "fp32"}, "torch's": {"cpu_adam": False}}


def llama(tied=False):
    return tiny_llama(tie_word_embeddings=tied).bfloat16()


def lightning(folder, options):
    saves = ModelCheckpoint(folder, filename="last", every_n_train_steps=STEPS)
    more = {"enable_checkpointing": True, "callbacks": [saves]}
    trainer = make_trainer(offload(**options), max_steps=STEPS, precision="bf16-true", **more)
    trainer.fit(LlamaTask(llama(tied=True), optimizer="adamw"), token_data(STEPS))
    return folder / "last.ckpt", torch.load(folder / "last.ckpt")


def fabric(folder, options):
    strategy = lightning_cxl.CXLFabricStrategy(**options)
    fabric = make_fabric(strategy, "bf16-true")
    model = llama(tied=True)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for tokens, labels in fabric.setup_dataloaders(token_data(STEPS)):
        fabric.backward(model(input_ids=tokens, labels=labels).loss)
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(folder / "last.ckpt", {"model": model, "optimizer": optimizer})
    strategy.teardown()
    saved = torch.load(folder / "last.ckpt")
    return folder / "last.ckpt", as_lightning(saved["model"], saved["optimizer"])


def as_lightning(weights, optimizer):
    return {"state_dict": weights, "optimizer_states": [optimizer], "lightning_cxl": optimizer["lightning_cxl"]}


def accelerate(folder, options):
    accelerator = accelerate_loop.make_accelerator(options)
    parts = accelerate_loop.prepared(accelerator, llama)

    def loss_of(model, batch):
        return model(input_ids=batch[0], labels=batch[1]).loss

    list(accelerate_loop.steps(accelerator, *parts, loss_of=loss_of))
    accelerator.save_state(str(folder / "state"))
    accelerator.free_memory()
    saved = torch.load(folder / "state" / "optimizer.bin")
    return folder / "state", as_lightning(load_file(folder / "state" / "model.safetensors"), saved)


def trainer(folder, options):
    hf_trainer.train(folder, options, model=llama(), save_strategy="steps", save_steps=STEPS)
    path = folder / f"checkpoint-{STEPS}"
    return path, as_lightning(load_file(path / "model.safetensors"), torch.load(path / "optimizer.pt"))


@pytest.mark.parametrize(("front_end", "options"), every_value([lightning, fabric, accelerate, trainer], OPTIONS))
def test_float32_is_written_from_master_weights(tmp_path, front_end, options):
    path, checkpoint = front_end(tmp_path, {"stream_weights": True, **OPTIONS[options]})
    model = llama(tied=front_end in (lightning, fabric))
    model.save_pretrained(tmp_path / "base")
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    exported = export_checkpoint(path, wide, base=tmp_path / "base", dtype=torch.float32)
    assert exported.num_masters >= len(list(model.parameters()))
    assert export_checkpoint(path, narrow, base=tmp_path / "base").num_masters == 0
    plain = lightning_cxl.plain_checkpoint(checkpoint)
    expected, computed = ({k: v.cpu() for k, v in each["state_dict"].items()} for each in (plain, checkpoint))
    prefix = "model." if front_end is lightning else ""
    found = [AutoModelForCausalLM.from_pretrained(each, dtype="auto") for each in (wide, narrow)]
    num_rounded = 0
    for name, parameter in found[0].named_parameters():
        assert torch.equal(parameter, expected[prefix + name]), name
        assert torch.equal(found[1].get_parameter(name), computed[prefix + name]), name
        num_rounded += int((parameter != computed[prefix + name].float()).sum())
    assert num_rounded > 1000
    assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"


def test_master_weights_that_a_file_only_refers_to_are_refused(tmp_path):
    ssd = {"path": str(tmp_path / "ssd"), "budget": "64MiB", "checkpoint": "reference"}
    path, _ = lightning(tmp_path, {"tiers": {"ssd": ssd}, "tier_rules": {"*": {"optimizer_state": "ssd"}}})
    llama(tied=True).save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="refers to master weights on SSD"):
        export_checkpoint(path, tmp_path / "out", base=tmp_path / "base", dtype=torch.float32)
    export_checkpoint(path, tmp_path / "out", base=tmp_path / "base")
    torch.save(lightning_cxl.plain_checkpoint(torch.load(path)), tmp_path / "plain.ckpt")
    export_checkpoint(tmp_path / "plain.ckpt", tmp_path / "wide", base=tmp_path / "base", dtype=torch.float32)


def test_masters_of_other_names_are_refused(tmp_path):
    path, checkpoint = lightning(tmp_path, {"master": "fp32"})
    llama(tied=True).save_pretrained(tmp_path / "base")
    own = checkpoint["lightning_cxl"]
    own["master_weights"] = {f"other.{name}": value for name, value in own["master_weights"].items()}
    torch.save(checkpoint, path)
    with pytest.raises(lightning_cxl.CheckpointError, match="none has the name of a weight"):
        export_checkpoint(path, tmp_path / "out", base=tmp_path / "base", dtype=torch.float32)
