"""`from_pretrained` against transformers' own."""

import json

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from lightning_cxl import from_pretrained, save_pretrained
from lightning_cxl.commands.export import build_empty
from lightning_cxl.errors import CheckpointError, ConfigError, LightningCXLWarning, UnsupportedError
from lightning_cxl.finetune.data import load_tokenizer
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.weights.hf import model_on_meta
from tests.models import TINY_LLAMA

BERT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASES = {
    "Llama": lambda: (tf.LlamaForCausalLM(tf.LlamaConfig(**TINY_LLAMA)), tf.AutoModelForCausalLM),
    "Llama, tied": lambda: (
        tf.LlamaForCausalLM(tf.LlamaConfig(**TINY_LLAMA, tie_word_embeddings=True)),
        tf.LlamaForCausalLM,
    ),
    "Llama 3 rotary": lambda: (
        tf.LlamaForCausalLM(tf.LlamaConfig(**TINY_LLAMA, rope_scaling=ROPE)),
        tf.AutoModelForCausalLM,
    ),
    "Llama without head": lambda: (tf.LlamaModel(tf.LlamaConfig(**TINY_LLAMA)), tf.AutoModel),
    "Qwen2": lambda: (
        tf.Qwen2ForCausalLM(tf.Qwen2Config(**TINY_LLAMA, tie_word_embeddings=True)),
        tf.AutoModelForCausalLM,
    ),
    "GPT-2": lambda: (tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)), tf.AutoModelForCausalLM),
    "BERT": lambda: (tf.BertForMaskedLM(tf.BertConfig(**BERT)), tf.AutoModelForMaskedLM),
    "T5": lambda: (tf.T5ForConditionalGeneration(tf.T5Config(**T5)), tf.AutoModelForSeq2SeqLM),
    "ViT": lambda: (
        tf.ViTForImageClassification(
            tf.ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                image_size=32,
                patch_size=8,
            )
        ),
        tf.AutoModelForImageClassification,
    ),
}


@pytest.fixture(autouse=True)
def _quiet():
    tf.logging.disable_progress_bar()


def save(model, folder):
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def ties(model):
    named = list(model.named_parameters(remove_duplicate=False))
    return {frozenset(name for name, other in named if other is parameter) for _, parameter in named}


def assert_equal_models(ours, theirs):
    assert type(ours) is type(theirs)
    for kind in ("named_parameters", "named_buffers"):
        mine, other = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name].dtype == value.dtype, name
            assert torch.equal(mine[name], value), name
            assert mine[name].requires_grad == value.requires_grad
    assert ties(ours) == ties(theirs)
    assert [m.training for m in ours.modules()] == [m.training for m in theirs.modules()]
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.config._attn_implementation == theirs.config._attn_implementation
    if theirs.can_generate():
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_model_is_the_one_that_transformers_loads(tmp_path, case, dtype):
    model, auto = CASES[case]()
    save(model, tmp_path)
    options = {} if dtype is None else {"dtype": dtype}
    assert_equal_models(from_pretrained(auto, tmp_path, dtype), auto.from_pretrained(tmp_path, **options))


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_we_save_and_so_do_we(tmp_path, case):
    model, auto = CASES[case]()
    save(model, tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours", max_shard_bytes=30_000)
    names = lambda folder: {name for path in folder.glob("*.safetensors") for name in load_file(path)}  # noqa: E731
    assert names(tmp_path / "ours") == names(tmp_path / "theirs"), "also where transformers has others in memory"
    ours, theirs = (json.loads((tmp_path / who / "config.json").read_text()) for who in ("ours", "theirs"))
    assert ours == theirs
    loaded, again = auto.from_pretrained(tmp_path / "ours"), from_pretrained(auto, tmp_path / "ours")
    assert_equal_models(again, loaded)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_a_model_is_saved_under_the_names_it_was_loaded_with(tmp_path):
    model, auto = CASES["ViT"]()
    save(model, tmp_path)
    ours, theirs = from_pretrained(auto, tmp_path), auto.from_pretrained(tmp_path)
    assert len(ours._weight_conversions) == len(theirs._weight_conversions) > 0
    ours.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() != ours.state_dict().keys()
    save_pretrained(ours, tmp_path / "ours")
    names = [load_file(tmp_path / who / "model.safetensors").keys() for who in ("again", "ours")]
    assert names[0] == names[1]


def test_a_config_without_a_dtype_leaves_it_to_the_files(tmp_path):
    save(tf.LlamaForCausalLM(tf.LlamaConfig(**TINY_LLAMA)).bfloat16(), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert from_pretrained(tf.AutoModelForCausalLM, tmp_path).dtype == torch.bfloat16


def test_fields_of_the_config_can_be_replaced(tmp_path):
    save(tf.LlamaForCausalLM(tf.LlamaConfig(**TINY_LLAMA)), tmp_path)
    model = from_pretrained(tf.LlamaForCausalLM, tmp_path, attn_implementation="eager", rms_norm_eps=0.5)
    assert model.config._attn_implementation == "eager" and model.model.norm.variance_epsilon == 0.5
    assert_equal_models(
        model, tf.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", rms_norm_eps=0.5)
    )
    with pytest.raises(ConfigError, match="LlamaConfig has no field 'rms_norm_epsilon'"):
        from_pretrained(tf.LlamaForCausalLM, tmp_path, rms_norm_epsilon=0.5)


def test_names_of_old_files_are_translated(tmp_path):
    model = tf.BertForMaskedLM(tf.BertConfig(**BERT))
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in state.items()}
    assert old.keys() != state.keys()
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_equal_models(from_pretrained(tf.BertForMaskedLM, tmp_path), tf.BertForMaskedLM.from_pretrained(tmp_path))


def test_a_base_model_loads_into_one_with_a_new_head(tmp_path):
    save(tf.BertModel(tf.BertConfig(**BERT)), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"2 weights are missing from the files: `classifier\.weight`, `classifier"
    ):
        from_pretrained(tf.BertForSequenceClassification, tmp_path)
    with pytest.warns(LightningCXLWarning, match=r"newly initialised.*classifier\.weight"):
        model = from_pretrained(tf.BertForSequenceClassification, tmp_path, num_labels=3, strict=False)
    reference = tf.BertForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(model.classifier.bias, torch.zeros(3))
    assert 0.005 < model.classifier.weight.std() < 0.06 and model.classifier.weight.shape == (3, 32)
    reference.classifier.load_state_dict(model.classifier.state_dict())
    assert_equal_models(model, reference)


def test_a_model_with_a_head_loads_into_the_base_model(tmp_path):
    save(tf.LlamaForCausalLM(tf.LlamaConfig(**TINY_LLAMA)), tmp_path)
    with pytest.raises(CheckpointError, match=r"1 tensors of the files are not in the model: `lm_head\.weight`"):
        from_pretrained(tf.LlamaModel, tmp_path)
    with pytest.warns(LightningCXLWarning, match=r"In the files but not in the model: \['lm_head\.weight'\]"):
        model = from_pretrained(tf.LlamaModel, tmp_path, strict=False)
    assert_equal_models(model, tf.LlamaModel.from_pretrained(tmp_path))


def test_tied_in_the_config_but_not_in_the_files_names_the_way_out(tmp_path):
    save(tf.LlamaForCausalLM(tf.LlamaConfig(**TINY_LLAMA)), tmp_path)
    with pytest.raises(CheckpointError, match="tie_word_embeddings=False"):
        from_pretrained(tf.LlamaForCausalLM, tmp_path, tie_word_embeddings=True)
    model = from_pretrained(tf.LlamaForCausalLM, tmp_path, tie_word_embeddings=False)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def mixture():
    return tf.MixtralForCausalLM(tf.MixtralConfig(**TINY_LLAMA, num_local_experts=12))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_experts_are_merged_in_the_order_of_their_numbers(tmp_path, dtype):
    save(mixture(), tmp_path)
    options = {} if dtype is None else {"dtype": dtype}
    ours = from_pretrained(tf.AutoModelForCausalLM, tmp_path, dtype)
    assert_equal_models(ours, tf.AutoModelForCausalLM.from_pretrained(tmp_path, **options))
    ours.save_pretrained(tmp_path / "apart")
    whole = {name for path in tmp_path.glob("*.safetensors") for name in load_file(path)}
    assert load_file(tmp_path / "apart" / "model.safetensors").keys() == whole


def test_merged_experts_are_saved_merged_with_a_warning_and_load(tmp_path):
    model = mixture()
    with pytest.warns(LightningCXLWarning, match=r"4 tensors of MixtralForCausalLM are merged .*gate_up_proj"):
        save_pretrained(model, tmp_path)
    reference = tf.MixtralForCausalLM.from_pretrained(tmp_path)
    assert_equal_models(from_pretrained(tf.MixtralForCausalLM, tmp_path), reference)
    assert torch.equal(reference.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("lost", [r"experts.3.w1.weight", r"experts.3.w2.weight"])
def test_a_missing_expert_is_an_error_before_anything_is_loaded(tmp_path, lost):
    mixture().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = {
        name: value for name, value in load_file(path).items() if not name.endswith(f"layers.1.block_sparse_moe.{lost}")
    }
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"do not make up `model\.layers\.1\.mlp|do not fit MixtralForCausalLM"):
        from_pretrained(tf.MixtralForCausalLM, tmp_path)


def test_what_is_no_folder_of_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"not a folder with a config\.json.*hf download"):
        from_pretrained(tf.AutoModelForCausalLM, "some/model")
    tf.LlamaConfig(**TINY_LLAMA).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        from_pretrained(tf.AutoModelForCausalLM, tmp_path)
    with pytest.raises(ConfigError, match="dtype is 'auto'; give one of torch"):
        from_pretrained(tf.AutoModelForCausalLM, tmp_path, "auto")
    with pytest.raises(ConfigError, match="not a model class"):
        from_pretrained(torch.nn.Linear, tmp_path, torch.float32)
    tf.LlamaConfig(**TINY_LLAMA, quantization_config={"quant_method": "fp8"}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="quantised by fp8"):
        from_pretrained(tf.AutoModelForCausalLM, tmp_path)


@pytest.mark.parametrize("kind", ["model", "plan", "export", "tokenizer", "main job"])
def test_code_of_a_model_is_neither_run_nor_asked_about(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("builtins.input", lambda text: pytest.fail("asked"))
    names = {"AutoConfig": "strange.Config", "AutoModelForCausalLM": "strange.Model"}
    config = {"model_type": "strange", "auto_map": {**names, "AutoTokenizer": ["strange.Tokenizer", None]}}
    (tmp_path / "strange.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(config))
    load = {
        "model": lambda: from_pretrained(tf.AutoModelForCausalLM, tmp_path),
        "plan": lambda: model_on_meta(str(tmp_path)),
        "export": lambda: build_empty(config),
        "tokenizer": lambda: load_tokenizer(str(tmp_path)),
        "main job": lambda: CausalLM(name_or_path=str(tmp_path)).configure_model(),
    }[kind]
    with pytest.raises(ConfigError, match=r"code of its own.*trust_remote_code=False.*lightning_cxl\.from_pretrained"):
        load()
    assert not (tmp_path / "ran").exists()
