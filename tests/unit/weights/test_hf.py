import json
from unittest.mock import Mock

import pytest
import torch
import transformers as tf
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from lightning_cxl import from_pretrained, save_pretrained
from lightning_cxl.commands.export import build_empty
from lightning_cxl.errors import CheckpointError, ConfigError, LightningCXLWarning
from lightning_cxl.finetune.data import load_tokenizer
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.weights import hf as model_names
from lightning_cxl.weights.hf import is_cached, model_on_meta, require_model
from tests.models import TINY_LLAMA

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BERT, VIT = {"vocab_size": 64, **SMALL}, {"image_size": 32, "patch_size": 8, **SMALL}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE = {"rope_type": "llama3", "original_max_position_embeddings": 32, **SCALING}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
TIED = {**TINY_LLAMA, "tie_word_embeddings": True}
BF16 = {"dtype": torch.bfloat16}


def llama(**fields):
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**TINY_LLAMA, **fields}))


CASES = {
    "Llama": lambda: (llama(), tf.AutoModelForCausalLM),
    "Llama, tied": lambda: (llama(**TIED), tf.LlamaForCausalLM),
    "Llama 3 rotary": lambda: (llama(rope_scaling=ROPE), tf.AutoModelForCausalLM),
    "Llama without head": lambda: (tf.LlamaModel(tf.LlamaConfig(**TINY_LLAMA)), tf.AutoModel),
    "Qwen2": lambda: (tf.Qwen2ForCausalLM(tf.Qwen2Config(**TIED)), tf.AutoModelForCausalLM),
    "GPT-2": lambda: (tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, eos_token_id=2)), tf.AutoModelForCausalLM),
    "BERT": lambda: (tf.BertForMaskedLM(tf.BertConfig(**BERT)), tf.AutoModelForMaskedLM),
    "T5": lambda: (tf.T5ForConditionalGeneration(tf.T5Config(**T5)), tf.AutoModelForSeq2SeqLM),
    "ViT": lambda: (tf.ViTForImageClassification(tf.ViTConfig(**VIT)), tf.AutoModelForImageClassification),
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


def names_in(folder):
    return {name for path in folder.glob("*.safetensors") for name in load_file(path)}


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_the_one_that_transformers_loads_and_loads_what_we_save(tmp_path, case):
    model, auto = CASES[case]()
    folder = save(model, tmp_path / "theirs")
    for options in ({}, BF16, {"dtype": torch.float16}):
        assert_equal_models(from_pretrained(auto, folder, **options), auto.from_pretrained(folder, **options))
    save_pretrained(model, tmp_path / "ours", max_shard_bytes=30_000)
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs"), "also where transformers has others in memory"
    ours, theirs = (json.loads((tmp_path / who / "config.json").read_text()) for who in ("ours", "theirs"))
    assert ours == theirs
    loaded, again = auto.from_pretrained(tmp_path / "ours"), from_pretrained(auto, tmp_path / "ours")
    assert_equal_models(again, loaded)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_models_are_saved_under_the_names_they_were_loaded_with_and_old_names_translated(tmp_path):
    model, auto = CASES["ViT"]()
    save(model, tmp_path)
    ours, theirs = from_pretrained(auto, tmp_path), auto.from_pretrained(tmp_path)
    assert len(ours._weight_conversions) == len(theirs._weight_conversions) > 0
    ours.save_pretrained(tmp_path / "again")
    save_pretrained(ours, tmp_path / "ours")
    assert names_in(tmp_path / "again") == names_in(tmp_path / "ours") != ours.state_dict().keys()
    tf.BertForMaskedLM(tf.BertConfig(**BERT)).save_pretrained(tmp_path)
    old_name = lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma")  # noqa: E731
    rewrite(tmp_path / "model.safetensors", lambda state: {old_name(name): each for name, each in state.items()})
    assert "LayerNorm.gamma" in str(names_in(tmp_path))
    assert_equal_models(from_pretrained(tf.BertForMaskedLM, tmp_path), tf.BertForMaskedLM.from_pretrained(tmp_path))


def rewrite(path, change):
    """Change the tensors of a safetensors file, by name: in place, or as other ones."""
    state = load_file(path)
    changed = change(state)
    save_file(changed if isinstance(changed, dict) else state, path, metadata={"format": "pt"})


def test_a_base_model_loads_into_one_with_a_new_head(tmp_path):
    save(tf.BertModel(tf.BertConfig(**BERT)), tmp_path)
    with pytest.raises(CheckpointError, match=r"2 weights are missing .*: `classifier\.weight`, `classifier"):
        from_pretrained(tf.BertForSequenceClassification, tmp_path)
    with pytest.warns(LightningCXLWarning, match=r"newly initialised.*classifier\.weight") as told:
        model = from_pretrained(tf.BertForSequenceClassification, tmp_path, num_labels=3, strict=False)
    assert told[0].filename == __file__
    reference = tf.BertForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert torch.equal(model.classifier.bias, torch.zeros(3))
    assert 0.005 < model.classifier.weight.std() < 0.06 and model.classifier.weight.shape == (3, 32)
    reference.classifier.load_state_dict(model.classifier.state_dict())
    assert_equal_models(model, reference)


def mixture():
    return tf.MixtralForCausalLM(tf.MixtralConfig(**TINY_LLAMA, num_local_experts=12))


@pytest.mark.parametrize("options", [{}, BF16], ids=str)
def test_experts_are_merged_in_the_order_of_their_numbers(tmp_path, options):
    save(mixture(), tmp_path)
    ours = from_pretrained(tf.AutoModelForCausalLM, tmp_path, **options)
    assert_equal_models(ours, tf.AutoModelForCausalLM.from_pretrained(tmp_path, **options))
    ours.save_pretrained(tmp_path / "apart")
    assert names_in(tmp_path / "apart") == names_in(tmp_path)


def test_merged_experts_are_saved_merged_with_a_warning_and_load(tmp_path):
    model = mixture()
    with pytest.warns(LightningCXLWarning, match=r"4 tensors of MixtralForCausalLM are merged .*gate_up_proj"):
        save_pretrained(model, tmp_path)
    reference = tf.MixtralForCausalLM.from_pretrained(tmp_path)
    assert_equal_models(from_pretrained(tf.MixtralForCausalLM, tmp_path), reference)
    assert torch.equal(reference.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("lost", ["w1", "w2"])
def test_a_missing_expert_is_an_error_before_anything_is_loaded(tmp_path, lost):
    mixture().save_pretrained(tmp_path)
    lost = f"model.layers.1.block_sparse_moe.experts.3.{lost}.weight"
    rewrite(tmp_path / "model.safetensors", lambda state: {name: state[name] for name in state.keys() - {lost}})
    with pytest.raises(CheckpointError, match=r"do not make up `model\.layers\.1\.mlp|do not fit MixtralForCausalLM"):
        from_pretrained(tf.MixtralForCausalLM, tmp_path)


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


def test_cached_models_need_no_hub_and_others_are_asked_for_with_a_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    ask = Mock()
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", ask)
    cached, revision = tmp_path / "cache" / "models--owner--name", "0" * 40
    (cached / "snapshots" / revision).mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    assert not is_cached("owner/name")
    require_model("owner/name")
    ask.assert_called_once_with("owner/name", timeout=model_names._HUB_SECONDS)
    (cached / "snapshots" / revision / "config.json").write_text("{}")
    require_model("owner/name")
    ask.assert_called_once()
    ask.side_effect = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    with pytest.raises(ConfigError, match=r"did you mean qwen2.5-0.5b \(Qwen/Qwen2.5-0.5B\).*no such model"):
        require_model("Qwen/Qwen2.5-0.5")
