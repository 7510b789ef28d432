import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from torch import nn
from transformers.modeling_utils import local_torch_dtype

from lightning_cxl import empty_weights, from_pretrained, load_weights, save_pretrained
from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError
from lightning_cxl.weights import models as quantise
from lightning_cxl.weights.files import FileTensor
from tests.fakes import failing
from tests.models import TINY_LLAMA
from tests.unit.weights.test_hf import GPT2, rewrite

bnb = pytest.importorskip("bitsandbytes")
AUTO = tf.AutoModelForCausalLM
TIED = dict(TINY_LLAMA, tie_word_embeddings=True)

MODELS = {
    "Llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TINY_LLAMA)),
    "Qwen2: biases, tied": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**TIED)),
    "GPT-2: weights the other way round": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, eos_token_id=2)),
}
SKIPPED = ["lm_head", "q_proj", "c_fc"]
NESTED = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
BRAIN = {"bnb_4bit_compute_dtype": torch.bfloat16, "bnb_4bit_quant_storage": torch.bfloat16}
WAYS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4, nested": {**NESTED, "bnb_4bit_quant_type": "nf4"},
    "all options": {**NESTED, **BRAIN, "bnb_4bit_quant_type": "fp4", "llm_int8_skip_modules": SKIPPED},
    "8 bit": {"load_in_8bit": True},
    "8 bit, no outliers": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}


@pytest.fixture(autouse=True)
def _quiet():
    tf.logging.disable_progress_bar()


@pytest.fixture(params=[None, 3])
def _chunks(request, monkeypatch):
    """Weights as one chunk, and as chunks of three blocks with a rest."""
    if request.param is not None:
        monkeypatch.setattr(quantise, "_CHUNK_NUMBERS", request.param * 64)


def theirs(folder, dtype="auto", **fields):
    config = {"quantization_config": tf.BitsAndBytesConfig(**fields)} if fields else {}
    return AUTO.from_pretrained(folder, dtype=dtype, device_map={"": "cpu"}, **config)


def ours(folder, dtype=None, **fields):
    return from_pretrained(AUTO, folder, dtype, quantization_config=tf.BitsAndBytesConfig(**fields))


def facts(value):
    """Everything that an object of a quantised layer holds, in a form that compares bit by bit."""
    if isinstance(value, torch.Tensor):
        own = {key: facts(each) for key, each in value.__dict__.items() if key not in ("module", "_is_hf_initialized")}
        numbers = value.detach().contiguous().view(-1).view(torch.uint8).tolist()
        return type(value), value.dtype, tuple(value.shape), value.requires_grad, numbers, own
    if type(value).__name__ in ("QuantState", "MatmulLtState"):
        return {key: facts(each) for key, each in vars(value).items()}
    return value


def assert_same(one, other):
    modules, twins = (dict(each.named_modules()) for each in (one, other))
    assert modules.keys() == twins.keys()
    names = ("compute_dtype", "compute_type_is_set", "quant_storage", "quant_state", "state", "training")
    for name, mine in modules.items():
        assert type(mine) is type(twins[name])
        for key in names:
            assert facts(getattr(mine, key, None)) == facts(getattr(twins[name], key, None)), (name, key)
    parameters, expected = (dict(each.named_parameters()) for each in (one, other))
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert facts(parameter) == facts(expected[name]), name
    for name in ("is_quantized", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        assert getattr(one, name, None) == getattr(other, name, None), name
    assert type(one.hf_quantizer) is type(other.hf_quantizer)
    assert one.config.quantization_config.to_dict() == other.config.quantization_config.to_dict()
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(one(ids).logits, other(ids).logits)


def save(model, folder):
    model.save_pretrained(folder, max_shard_size="30KB")
    return folder


@pytest.fixture
def plain(tmp_path):
    return save(MODELS["Llama"](), tmp_path / "plain")


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_model_is_the_one_that_transformers_quantises(tmp_path, kind, way):
    torch.manual_seed(0)
    folder = save(MODELS[kind](), tmp_path)
    assert_same(ours(folder, **WAYS[way]), theirs(folder, **WAYS[way]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["nf4", "nf4, nested", "8 bit"])
def test_weights_are_rounded_to_the_models_type_first(plain, way, dtype):
    """And scales do not get torch's default type, which Lightning sets in bf16-true."""
    assert_same(ours(plain, dtype, **WAYS[way]), theirs(plain, dtype, **WAYS[way]))
    expected = theirs(plain, dtype, **WAYS[way])
    with local_torch_dtype(dtype):
        found = ours(plain, dtype, **WAYS[way])
    assert_same(found, expected)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_quantised_is_saved_and_quantised_files_load_as_they_are(tmp_path, kind, way):
    folder = save(MODELS[kind](), tmp_path / "plain")
    expected = theirs(folder, **WAYS[way])
    quantised = save(expected, tmp_path / "theirs")
    for mapped in (False, True):  # each time new models: a forward may convert biases
        assert_same(from_pretrained(AUTO, quantised, mapped=mapped), theirs(quantised))
    save_pretrained(ours(folder, **WAYS[way]), tmp_path / "ours", max_shard_bytes="30KB", dtype=torch.float32)
    assert_same(theirs(tmp_path / "ours"), expected)
    assert_same(from_pretrained(AUTO, tmp_path / "ours"), theirs(tmp_path / "ours"))


def test_no_weight_is_read_as_a_whole(plain, monkeypatch):
    whole = []
    read_into = FileTensor.read_into
    monkeypatch.setattr(FileTensor, "read_into", lambda self, *rest: whole.append(self.name) or read_into(self, *rest))
    kinds = {name: type(parameter).__name__ for name, parameter in ours(plain, **WAYS["nf4"]).named_parameters()}
    assert sorted(whole) == sorted(name for name, kind in kinds.items() if kind == "Parameter")
    assert "Params4bit" in kinds.values()


IN_8_BIT = {"load_in_8bit": True}


def test_settings_that_are_refused(tmp_path):
    folder = save(MODELS["Qwen2: biases, tied"](), tmp_path)
    for fields, error, message in (
        ({**IN_8_BIT, "llm_int8_has_fp16_weight": True}, UnsupportedError, "full-precision weights"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, ConfigError, 'nothing: .* with "nf4" or "fp4"'),
        ({**IN_8_BIT, "llm_int8_skip_modules": []}, UnsupportedError, "tied to `model.embed_tokens.weight`"),
    ):
        with pytest.raises(error, match=message):
            ours(folder, **fields)


@pytest.mark.parametrize(
    ("way", "change", "message"),
    [
        ("nf4", lambda t, w: t.pop(f"{w}.quant_state.bitsandbytes__nf4"), "Complete the download"),
        ("nf4, nested", lambda t, w: t.pop(f"{w}.nested_quant_map"), "KeyError: 'nested_quant_map'"),
        ("nf4", lambda t, w: t.update({w: t[w][:-1].clone()}), "numbers of 4 bit"),
        ("nf4", lambda t, w: t[f"{w}.quant_state.bitsandbytes__nf4"].zero_(), "JSONDecodeError"),
        ("8 bit", lambda t, w: t.pop(w.replace(".weight", ".SCB")), "KeyError: 'SCB'"),
        ("8 bit", lambda t, w: t[w.replace(".weight", ".weight_format")].add_(1), "layout of an old bitsandbytes"),
    ],
)
def test_damaged_quantised_files_are_named(plain, tmp_path, way, change, message):
    theirs(plain, **WAYS[way]).save_pretrained(tmp_path / "quantised")
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(tmp_path / "quantised" / "model.safetensors", lambda tensors: change(tensors, name))
    with pytest.raises(CheckpointError, match=f"`{name}`.*{message}"):
        from_pretrained(AUTO, tmp_path / "quantised")


def test_a_failure_leaves_the_weights_on_the_meta_device(tmp_path, monkeypatch):
    with empty_weights():
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Identity())
    model[1] = bnb.nn.Linear4bit(64, 64, bias=False, device="meta")
    tensors = {"0.weight": torch.zeros(8, 8), "1.weight": torch.zeros(64, 64)}
    save_file(tensors, tmp_path / "model.safetensors")
    failing(monkeypatch, FileTensor, "parts", 1, CheckpointError("a disk that fails"))
    with pytest.raises(CheckpointError, match="a disk that fails"):
        load_weights(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
