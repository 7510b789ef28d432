"""QLoRA of models and adapters of many kinds: the run is, bit by bit, the one without us."""

import pytest
import torch
import transformers as tf

import lightning_cxl
from tests.integration.test_qlora import NF4, QLoRA, fit
from tests.integration.training import EXACT, assert_identical, offload

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("kernels_of_bitsandbytes"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.* of weights are not quantised"),
    pytest.mark.filterwarnings("ignore:The .cpu.* AOT:UserWarning"),
]
SIZES = {
    "vocab_size": 37, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 5,
}  # fmt: skip
GPT2 = {
    "vocab_size": 37, "n_embd": 64, "n_layer": 5, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "Llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)),
    "Qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "GPT-2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
    "Mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, num_local_experts=4)),
}
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}  # what peft takes for most models: a block ends without an adapter
LAST_TOO = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
EIGHT_BIT = {"load_in_8bit": True}
APART = {  # model, quantisation, adapters
    "peft's usual adapters": ("Llama", NF4, ATTENTION),
    "biases are trained": ("Qwen2", NF4, ATTENTION | {"bias": "all"}),
    "a head that is tied is trained": (
        "Qwen2", NF4, ATTENTION | {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    ),
    "weights the other way round": (
        "GPT-2", NF4 | {"bnb_4bit_quant_type": "fp4"}, {"target_modules": ["c_attn", "c_proj"]},
    ),
    "experts in one weight": ("Mixtral", NF4, ATTENTION),
    "codes as bfloat16": ("Llama", NF4 | {"bnb_4bit_quant_storage": torch.bfloat16}, LAST_TOO),
}  # fmt: skip
CPU = {
    "8 bit": ("Llama", EIGHT_BIT, ATTENTION),
    "8 bit, outliers": ("Llama", EIGHT_BIT | {"llm_int8_threshold": 0.5}, LAST_TOO),
    "DoRA": ("Llama", NF4, LAST_TOO | {"use_dora": True}),
}


class Adapted(QLoRA):
    """Any adapters, on a base that `prepare` has had."""

    def __init__(self, load, adapters, prepare):
        super().__init__(load)
        self.adapters, self.prepare = adapters, prepare

    def configure_model(self):
        if self.model is None:
            with torch.device("cpu"):
                model = self.prepare(self.load())
                torch.manual_seed(1)
                adapters = peft.LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **self.adapters)
                self.model = peft.get_peft_model(model, adapters)


def assert_is_the_run_without_us(folder, kind, way, adapters, prepare=lambda model: model, **options):
    torch.manual_seed(3)
    tf.logging.disable_progress_bar()
    # what is trained of a 16-bit base has wider masters under us
    # and a 4-bit layer widens the biases of such a base where they do not stream
    wide = kind == "GPT-2" or not adapters.keys().isdisjoint({"bias", "modules_to_save"})
    MODELS[kind]().to(torch.float32 if wide else torch.bfloat16).save_pretrained(folder)

    def theirs():
        config = tf.BitsAndBytesConfig(**way)
        return tf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})

    def ours():
        config = tf.BitsAndBytesConfig(**way)
        return lightning_cxl.from_pretrained(tf.AutoModelForCausalLM, folder, quantization_config=config)

    runs = [
        fit(Adapted(load, adapters, prepare), how)
        for load, how in ((theirs, "auto"), (ours, offload(**EXACT, **options)))
    ]
    # as bytes: codes in a floating-point type may be NaN
    runs = [
        (losses, {k: v.contiguous().view(-1).view(torch.uint8) for k, v in state.items()}) for losses, state in runs
    ]
    assert_identical(*runs)
    assert len(set(runs[0][0])) == len(runs[0][0])


@pytest.mark.parametrize("case", APART)
def test_is_the_run_without_us(tmp_path, case):
    assert_is_the_run_without_us(tmp_path, *APART[case])


def test_a_base_that_peft_has_prepared(tmp_path):
    assert_is_the_run_without_us(tmp_path, "Llama", NF4, LAST_TOO, peft.prepare_model_for_kbit_training)


@pytest.mark.on_cpu
@pytest.mark.parametrize("case", CPU)
def test_is_the_run_without_us_where_the_cpu_computes(tmp_path, case):
    assert_is_the_run_without_us(tmp_path, *CPU[case], stream_weights=True)
