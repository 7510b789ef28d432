"""Exports where the base is quantised: the numbers that it computes with, and peft's merge into those."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from lightning_cxl.commands.export import export_checkpoint
from lightning_cxl.errors import CheckpointError
from tests.integration.quantised import KINDS, quantise_layers
from tests.unit.commands.export.test_export import adapted, assert_loads_as, fabric_file, llama

bnb = pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
]


def numbers(twin):
    """Return the weight that a quantised layer computes with."""
    if isinstance(twin, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(twin.weight.data, twin.weight.quant_state)
    return bnb.functional.int8_vectorwise_dequant(twin.weight.data, twin.weight.SCB)


def quantised(kind):
    """Return a model with quantised blocks, and the same with the numbers that it computes with."""
    model, plain = llama(hidden_size=64, attention_bias=False), llama(hidden_size=64, attention_bias=False)
    quantise_layers(model, kind)
    for name, layer in model.named_modules():
        if isinstance(layer, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
            plain.get_submodule(name).weight.data = numbers(layer).float()
    return model, plain


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_become_the_numbers_that_they_compute_with(tmp_path, kind):
    model, plain = quantised(kind)
    llama(hidden_size=64, attention_bias=False, seed=5).save_pretrained(
        tmp_path / "base"
    )  # its config counts, not its weights
    path = fabric_file(tmp_path / "last.ckpt", model)
    exported = export_checkpoint(path, tmp_path / "out", base=tmp_path / "base")
    assert "dequantised 14 weights" in " ".join(exported.notes)
    assert_loads_as(tmp_path / "out", plain)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_into_those_numbers(tmp_path, kind):
    model, plain = quantised(kind)
    plain.save_pretrained(tmp_path / "base")
    trained, expected = adapted(model), adapted(plain)
    trained.peft_config["default"].save_pretrained(tmp_path)
    path = fabric_file(tmp_path / "last.ckpt", trained)
    exported = export_checkpoint(path, tmp_path / "out", base=tmp_path / "base", adapter_config=tmp_path)
    assert "merged an adapter into 4 layers dequantised 14 weights" in " ".join(exported.notes)
    assert_loads_as(tmp_path / "out", expected.merge_and_unload())


def test_a_quantised_folder_is_a_base_too(tmp_path):
    """Its config says that it is quantised; the export's does not."""
    model, plain = quantised("4 bit, nested")
    plain.save_pretrained(tmp_path / "plain")
    (tmp_path / "base").mkdir()
    config = plain.config.to_dict() | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    trained = adapted(plain)
    trained.save_pretrained(tmp_path / "adapter")
    export_checkpoint(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert_loads_as(tmp_path / "out", trained.merge_and_unload())
    assert not hasattr(AutoModelForCausalLM.from_pretrained(tmp_path / "out").config, "quantization_config")


def test_bytes_without_scales_are_refused(tmp_path):
    model, plain = quantised("8 bit")
    plain.save_pretrained(tmp_path / "base")
    state = {name: value for name, value in model.state_dict().items() if not name.endswith("SCB")}
    torch.save(state, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"torch\.int8, and no scales"):
        export_checkpoint(tmp_path / "last.ckpt", tmp_path / "out", base=tmp_path / "base")
