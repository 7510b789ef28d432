"""`export --dtype float32` of runs with bfloat16 weights, of every front end: master weights, not what was rounded."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lightning_cxl
from lightning_cxl.commands.export import export_checkpoint
from lightning_cxl.errors import ConfigError
from tests.cases import every_value
from tests.integration.front_end_runs import HALF, train
from tests.integration.llama import tiny_llama

OPTIONS = {"split": {}, "whole": {"master": "fp32"}, "torch's": {"cpu_adam": False}}
SAVED = {
    "Lightning": "middle.ckpt", "Fabric": "middle.ckpt", "Accelerate": "middle", "HF Trainer": f"checkpoint-{HALF}"
}  # fmt: skip


def llama(tied=True):
    return tiny_llama(tie_word_embeddings=tied).bfloat16()


def saved_by(front_end, folder, options):
    tied = front_end in ("Lightning", "Fabric")
    train(front_end, folder, options, make_model=partial(llama, tied), saves=True)
    path = folder / SAVED[front_end]
    if front_end == "Lightning":
        return path, torch.load(path)
    if front_end == "Fabric":
        saved = torch.load(path)
        weights, optimizer = saved["model"], saved["optimizer"]
    else:
        weights = load_file(path / "model.safetensors")
        optimizer = torch.load(path / ("optimizer.bin" if front_end == "Accelerate" else "optimizer.pt"))
    return path, {
        "state_dict": weights, "optimizer_states": [optimizer], "lightning_cxl": optimizer["lightning_cxl"]
    }  # fmt: skip


@pytest.mark.parametrize(("front_end", "options"), every_value(SAVED, OPTIONS))
def test_float32_is_written_from_master_weights(tmp_path, front_end, options):
    path, checkpoint = saved_by(front_end, tmp_path, {"stream_weights": True, **OPTIONS[options]})
    model = llama(tied=front_end in ("Lightning", "Fabric"))
    model.save_pretrained(tmp_path / "base")
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    exported = export_checkpoint(path, wide, base=tmp_path / "base", dtype=torch.float32)
    assert f"{len(model.state_dict())} weights are the float32 master weights of the optimizer" in exported.notes
    assert "master" not in " ".join(export_checkpoint(path, narrow, base=tmp_path / "base").notes)
    plain = lightning_cxl.plain_checkpoint(checkpoint)
    expected, computed = ({k: v.cpu() for k, v in each["state_dict"].items()} for each in (plain, checkpoint))
    prefix = "model." if front_end == "Lightning" else ""
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
    path, _ = saved_by("Lightning", tmp_path, {"tiers": {"ssd": ssd}, "tier_rules": {"*": {"optimizer_state": "ssd"}}})
    llama().save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="refers to master weights on SSD"):
        export_checkpoint(path, tmp_path / "out", base=tmp_path / "base", dtype=torch.float32)
    export_checkpoint(path, tmp_path / "out", base=tmp_path / "base")
    torch.save(lightning_cxl.plain_checkpoint(torch.load(path)), tmp_path / "plain.ckpt")
    export_checkpoint(tmp_path / "plain.ckpt", tmp_path / "wide", base=tmp_path / "base", dtype=torch.float32)


def test_masters_of_other_names_are_refused(tmp_path):
    path, checkpoint = saved_by("Lightning", tmp_path, {"master": "fp32"})
    llama().save_pretrained(tmp_path / "base")
    own = checkpoint["lightning_cxl"]
    own["master_weights"] = {f"other.{name}": value for name, value in own["master_weights"].items()}
    torch.save(checkpoint, path)
    with pytest.raises(lightning_cxl.CheckpointError, match="none has the name of a weight"):
        export_checkpoint(path, tmp_path / "out", base=tmp_path / "base", dtype=torch.float32)
