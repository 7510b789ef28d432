"""QLoRA of models and adapters of many kinds: the run is, bit by bit, the one without us."""

import pytest
import torch
import transformers as tf

import lightning_cxl
from tests import training_device
from tests.integration.test_parity import assert_identical
from tests.integration.test_qlora import NF4, QLoRA, _library, fit  # noqa: F401  # a fixture
from tests.integration.training import EXACT, offload

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use_reentrant:FutureWarning"), pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .cpu.* AOT:UserWarning"),
]
SIZES = {
    "vocab_size": 37, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 5,
}  # fmt: skip
MODELS = {
    "Llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)),
    "Qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "GPT-2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=37, n_embd=64, n_layer=5, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)),
    "Mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, num_local_experts=4)),
}
LLAMA = {"target_modules": ["q_proj", "v_proj", "down_proj"]}


def kbit(model, **kw):
    return peft.prepare_model_for_kbit_training(model, **kw)


CASES = {
    "biases": ("Qwen2", NF4, {"target_modules": ["q_proj", "v_proj"], "bias": "all"}, None),
    "biases lora": ("Qwen2", NF4 | {"bnb_4bit_compute_dtype": torch.bfloat16}, {"target_modules": ["q_proj", "v_proj"], "bias": "all"}, None),
    "conv1d": ("GPT-2", NF4 | {"bnb_4bit_quant_type": "fp4"}, {"target_modules": ["c_attn", "c_proj"]}, None),
    "experts": ("Mixtral", NF4, {"target_modules": ["q_proj", "v_proj"]}, None),
    "saved": ("Llama", NF4, LLAMA | {"modules_to_save": ["embed_tokens", "lm_head"]}, None),
    "saved tied": ("Qwen2", NF4, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True}, None),
    "kbit": ("Llama", NF4, LLAMA, kbit),
    "kbit reentrant": ("Llama", NF4, LLAMA, lambda m: kbit(m, gradient_checkpointing_kwargs={"use_reentrant": False})),
    "kbit 8": ("Llama", {"load_in_8bit": True}, LLAMA, kbit),
    "default": ("Llama", NF4, {"target_modules": ["q_proj", "v_proj"]}, None),
    "dora": ("Llama", NF4, LLAMA | {"use_dora": True}, None),
    "storage": ("Llama", NF4 | {"bnb_4bit_quant_storage": torch.bfloat16}, LLAMA, None),
    "storage32": ("Llama", NF4 | {"bnb_4bit_quant_storage": torch.float32, "bnb_4bit_use_double_quant": True}, LLAMA, None),
    "skip": ("Llama", NF4 | {"llm_int8_skip_modules": ["q_proj", "lm_head"]}, LLAMA, None),
    "8 bit": ("Llama", {"load_in_8bit": True}, LLAMA, None),
    "8 bit outliers": ("Llama", {"load_in_8bit": True, "llm_int8_threshold": 0.5}, LLAMA, None),
    "8 bit none": ("Llama", {"load_in_8bit": True, "llm_int8_threshold": 0.0}, LLAMA, None),
    "8 bit biases": ("Qwen2", {"load_in_8bit": True}, {"target_modules": ["q_proj"], "bias": "all"}, None),
    "8 bit dora": ("Llama", {"load_in_8bit": True}, LLAMA | {"use_dora": True}, None),
    "head too": ("Llama", NF4 | {"llm_int8_skip_modules": ["nothing"]}, LLAMA, None),
}
bad = {"dropout"}


class Adapted(QLoRA):
    adapters, prepare = {}, None

    def configure_model(self):
        if self.model is not None:
            return
        with torch.device("cpu"):
            model = self.load()
            if self.prepare is not None:
                model = type(self).prepare(model)
            torch.manual_seed(1)
            self.model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **self.adapters))


def same(a, b):
    bits = lambda r: (r[0], {n: v.contiguous().view(-1).view(torch.uint8) for n, v in r[1].items()})
    assert_identical(bits(a), bits(b))


def run(tmp_path, case, options):
    kind, way, adapters, prepare = CASES[case]
    torch.manual_seed(3)
    tf.logging.disable_progress_bar()
    trains_base = 'bias' in adapters or 'modules_to_save' in adapters
    MODELS[kind]().to(torch.float32 if trains_base else torch.bfloat16).save_pretrained(tmp_path)
    config = lambda: tf.BitsAndBytesConfig(**way)
    loads = (
        lambda: tf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config(), device_map={"": "cpu"}),
        lambda: lightning_cxl.from_pretrained(tf.AutoModelForCausalLM, tmp_path, quantization_config=config()),
    )
    make = type("Made", (Adapted,), {"adapters": adapters, "prepare": staticmethod(prepare) if prepare else None})
    expected = fit(make(loads[0]), "auto")
    module = make(loads[1])
    strategy = offload(**EXACT, **options)
    result = fit(module, strategy)
    same(expected, result)
    assert len(set(expected[0])) > 6
    return module, strategy


@pytest.mark.parametrize("case", CASES)
def test_apart(tmp_path, case):
    run(tmp_path, case, {})


@pytest.mark.parametrize("case", CASES)
def test_apart_resident(tmp_path, case):
    run(tmp_path, case, {"stream_weights": False})


@pytest.mark.on_cpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stream", [False, True])
def test_cpu(tmp_path, case, stream):
    run(tmp_path, case, {"stream_weights": stream})
