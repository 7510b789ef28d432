import json

import accelerate
import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lightning_cxl.commands.export import TOKENIZER_FILES, export_checkpoint
from lightning_cxl.errors import CheckpointError, LightningCXLError, LightningCXLWarning
from tests.integration import quantised as quantising
from tests.unit.finetune.chats import CHATML, byte_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:Adapter .* LoRA tensor.* have invalid shape")  # it means biases
SHAPE = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "attention_bias": True,
}  # fmt: skip
IDS = torch.arange(12).view(2, 6)


def llama(*, tied=False, dtype=torch.float32, seed=0, **changed):
    torch.manual_seed(seed)
    config = LlamaConfig(tie_word_embeddings=tied, **{**SHAPE, **changed})
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture
def base(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def assert_loads_as(folder, expected, dtype=None):
    """The folder's model has the expected one's bits, names and logits."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or expected.dtype)
    found, wanted = loaded.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert torch.equal(logits(loaded), logits(expected))


class Task(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.metric = nn.Linear(2, 2)


def saved(contents):
    def write(path, model):
        torch.save(contents(model), path)
        return path

    return write


def accelerated(safe):
    def write(path, model):
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.save_state(str(path), safe_serialization=safe) if accelerator.prepare(model) else None
        return path

    return write


lightning_file = saved(lambda model: {"state_dict": Task(model).state_dict(), "optimizer_states": []})
fabric_file = saved(lambda model: {"model": model.state_dict(), "step": 3, "optimizer": {"state": {}}})
plain_file = saved(lambda model: model.state_dict())
FRONT_ENDS = {
    "lightning": lightning_file,
    "fabric": fabric_file,
    "plain": plain_file,
    "compiled": saved(lambda model: {"state_dict": {f"_orig_mod.{k}": v for k, v in model.state_dict().items()}}),
    "accelerate": accelerated(safe=True),
    "accelerate, pickles": accelerated(safe=False),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("write", FRONT_ENDS.values(), ids=FRONT_ENDS)
def test_weights_of_every_front_end_load_in_transformers(base, tmp_path, write, tied):
    model = llama(tied=tied, seed=1)
    model.config.save_pretrained(base)
    exported = export_checkpoint(write(tmp_path / "checkpoint", model), tmp_path / "out", base=base)
    assert_loads_as(tmp_path / "out", model)
    assert exported.num_tensors == len(model.state_dict()) - tied
    assert ("left out 2 tensors of other modules" in exported.notes) is (write is lightning_file)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == CHATML
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_checkpoint_of_the_hugging_face_trainer_needs_no_base(tmp_path):
    model, rows = llama(), [{"input_ids": row, "labels": row} for row in IDS]
    options = {"max_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    tokenizer = byte_tokenizer(CHATML, pad_token="<|endoftext|>")
    Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=rows, processing_class=tokenizer).train()
    path = tmp_path / "checkpoint-1"
    export_checkpoint(path, tmp_path / "out", dtype=torch.bfloat16, max_shard_bytes=20_000)
    assert_loads_as(tmp_path / "out", AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHATML


def adapted(model, **options):
    torch.manual_seed(2)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], **options}, task_type="CAUSAL_LM")
    result = peft.get_peft_model(model, config)
    for name, parameter in result.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    return result.eval()


KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora with bias": {"target_modules": ["q_proj"], "use_rslora": True, "lora_bias": True, "lora_alpha": 32},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "modules to save": {"modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapters_folder_merges_as_peft_merges(base, tmp_path, kind, dtype):
    llama(dtype=dtype).save_pretrained(base)
    model = adapted(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), **KINDS[kind])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    fresh = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    expected = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload()
    exported = export_checkpoint(tmp_path / "adapter", tmp_path / "out")  # the base is named in the config
    assert any(note.startswith("merged an adapter into ") for note in exported.notes)
    assert_loads_as(tmp_path / "out", expected)


@pytest.mark.parametrize("only_lora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_in_a_state_dict_merge_as_the_module_merges(base, tmp_path, kind, only_lora):
    model = adapted(AutoModelForCausalLM.from_pretrained(base), **KINDS[kind])
    model.peft_config["default"].save_pretrained(tmp_path)
    path = lightning_file(tmp_path / "last.ckpt", model)
    if only_lora:
        loaded = torch.load(path)
        loaded["state_dict"] = {
            name: value for name, value in loaded["state_dict"].items() if "lora_" in name or "modules_to_save" in name
        }
        torch.save(loaded, path)
    export_checkpoint(path, tmp_path / "out", base=base, adapter_config=tmp_path / "adapter_config.json")
    assert_loads_as(tmp_path / "out", model.merge_and_unload())


def test_an_adapter_alone_loads_in_peft_and_shares_no_folder_with_a_model(base, tmp_path):
    """transformers would put the adapter on the model."""
    model = adapted(AutoModelForCausalLM.from_pretrained(base))
    model.peft_config["default"].save_pretrained(tmp_path)
    path = fabric_file(tmp_path / "last.ckpt", model)
    alone = {"base": base, "adapter_config": tmp_path, "only_adapter": True}
    export_checkpoint(path, tmp_path / "out", **alone)
    fresh = AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(fresh, tmp_path / "out")), logits(model))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert not (tmp_path / "out" / "config.json").exists()
    plain = fabric_file(tmp_path / "plain.pt", llama())
    with pytest.raises(LightningCXLError, match=r"has `adapter_config\.json` of an adapter"):
        export_checkpoint(plain, tmp_path / "out", base=base)
    export_checkpoint(plain, tmp_path / "model", base=base)
    with pytest.raises(LightningCXLError, match=r"has `config\.json` of a model"):
        export_checkpoint(path, tmp_path / "model", **alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "several.pt"}, "has the entries teacher, student, and which"),
        ({"checkpoint": "code.pt"}, r"was not read: .*GLOBAL .*\.Task .* could run code"),
        ({"base": None}, r"has no config\.json: give the folder of .*, with --base"),
        ({"folder": "base"}, "read and written at once"),
        ({"checkpoint": "lora.pt"}, "does not say how they are scaled"),
        ({"checkpoint": "two_adapters.pt", "adapter_config": "adapter"}, r"several adapters \(default, second\)"),
        ({"checkpoint": "part.pt", "base": "only_config"}, "no file holds|are missing|missing"),
        ({"checkpoint": "tied_apart.pt", "base": "tied"}, "are tied in the model and differ"),
        ({"checkpoint": "twice.pt"}, "weights twice, under `(policy|reference).` and under"),
        ({"checkpoint": "on_tied", "base": "tied"}, "which the model ties to another weight"),
        ({"checkpoint": "named_a_path.pt", "adapter_config": "adapter", "only_adapter": True}, "a path"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_what_cannot_be_exported_is_refused_before_anything_is_written(base, tmp_path, options, message):
    model = AutoModelForCausalLM.from_pretrained(base)
    state = model.state_dict()
    files = {
        "plain": state,
        "several": {"teacher": state, "student": state},
        "code": {"state_dict": state, "object": Task(nn.Linear(1, 1))},
        "part": dict(list(state.items())[:3]),
        "twice": {f"{name}.{key}": value for name in ("policy", "reference") for key, value in state.items()},
        "tied_apart": state,
    }
    for name, contents in files.items():
        torch.save(contents, tmp_path / f"{name}.pt")
    for folder in ("only_config", "tied"):
        (tmp_path / folder).mkdir()
    model.config.save_pretrained(tmp_path / "only_config")
    llama(tied=True).save_pretrained(tmp_path / "tied")
    lora = adapted(model)
    lora.save_pretrained(tmp_path / "adapter")
    torch.save(lora.state_dict(), tmp_path / "lora.pt")
    named = {key.replace(".default", f".{tmp_path}/planted"): each for key, each in lora.state_dict().items()}
    torch.save(named, tmp_path / "named_a_path.pt")
    lora.add_adapter("second", lora.peft_config["default"])
    torch.save(lora.state_dict(), tmp_path / "two_adapters.pt")
    on_embedding = adapted(AutoModelForCausalLM.from_pretrained(base), target_modules=["embed_tokens"])
    on_embedding.save_pretrained(tmp_path / "on_tied", save_embedding_layers=False)
    given = {"checkpoint": "plain.pt", "folder": "out", "base": "base", **options}
    given = {key: tmp_path / value if isinstance(value, str) else value for key, value in given.items()}
    checkpoint, folder = given.pop("checkpoint"), given.pop("folder")
    with pytest.raises(LightningCXLError, match=message):
        export_checkpoint(checkpoint, folder, **given)
    assert not (tmp_path / "out").exists() and not (tmp_path / "planted").exists()


OUTSIDE = ["../../planted.json", "{}/planted.json", "..\\planted.json", "modeling_x.py", "a/config.json", ".."]


@pytest.mark.parametrize("name", OUTSIDE)
def test_only_config_and_tokenizer_are_written_whatever_a_checkpoint_names(base, tmp_path, name):
    before = set(tmp_path.rglob("*"))
    files = {name.format(tmp_path): "planted", "vocab.txt": "kept"}
    torch.save({"state_dict": llama().state_dict(), "transformers_files": files}, tmp_path / "crafted.ckpt")
    with pytest.warns(LightningCXLWarning, match=r"are not written: '.*'"):
        export_checkpoint(tmp_path / "crafted.ckpt", tmp_path / "deep" / "out", base=base)
    new = {path.name for path in tmp_path.rglob("*") if path not in before and path.is_file()}
    assert new <= {"crafted.ckpt", "model.safetensors", "config.json", "generation_config.json", *TOKENIZER_FILES}
    assert (tmp_path / "deep" / "out" / "vocab.txt").read_text() == "kept"
    assert not any(path.read_bytes() == b"planted" for path in tmp_path.rglob("*.*") if path.is_file())


def quantised(kind):
    """Return a model with quantised blocks, and the same with the numbers that it computes with."""
    model, plain = llama(hidden_size=64, attention_bias=False), llama(hidden_size=64, attention_bias=False)
    bnb = pytest.importorskip("bitsandbytes")
    quantising.quantise_layers(model, kind)
    for name, layer in model.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            found = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            found = bnb.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        else:
            continue
        plain.get_submodule(name).weight.data = found.float()
    return model, plain


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("kind", quantising.KINDS)
def test_quantised_weights_become_the_numbers_that_they_compute_with(tmp_path, kind, adapter):
    model, plain = quantised(kind)
    llama(hidden_size=64, attention_bias=False, seed=5).save_pretrained(tmp_path / "base")  # its config counts
    options, merged = {}, ""
    if adapter:
        model, plain, merged = adapted(model), adapted(plain), "merged an adapter into 4 layers "
        model.peft_config["default"].save_pretrained(tmp_path)
        options = {"adapter_config": tmp_path}
    path = fabric_file(tmp_path / "last.ckpt", model)
    exported = export_checkpoint(path, tmp_path / "out", base=tmp_path / "base", **options)
    assert f"{merged}dequantised 14 weights" in " ".join(exported.notes)
    assert_loads_as(tmp_path / "out", plain.merge_and_unload() if adapter else plain)


def test_bytes_without_scales_are_refused(tmp_path):
    model, plain = quantised("8 bit")
    plain.save_pretrained(tmp_path / "base")
    state = {name: value for name, value in model.state_dict().items() if not name.endswith("SCB")}
    torch.save(state, tmp_path / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"torch\.int8, and no scales"):
        export_checkpoint(tmp_path / "last.ckpt", tmp_path / "out", base=tmp_path / "base")


def test_an_export_onto_an_earlier_one_is_as_in_a_new_folder_and_what_its_files_link_to_stays(base, tmp_path):
    path = plain_file(tmp_path / "plain.pt", llama(seed=1))
    export_checkpoint(path, tmp_path / "out", base=base, max_shard_bytes=20_000)
    (base / "chat_template.jinja").unlink()
    (tmp_path / "other").write_text("stays")
    (tmp_path / "out" / "config.json").unlink()
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "other")
    export_checkpoint(path, tmp_path / "out", base=base)
    assert (tmp_path / "other").read_text() == "stays"
    export_checkpoint(path, tmp_path / "new", base=base)
    contents = [{each.name: each.read_bytes() for each in (tmp_path / name).iterdir()} for name in ("out", "new")]
    assert contents[0] == contents[1]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is None
