"""QLoRA: files quantised while they load, adapters of peft on top; as with transformers, peft, bitsandbytes alone."""

from functools import partial
from unittest import mock

import pytest
import torch
import transformers as tf
from lightning.pytorch import LightningModule, seed_everything

import lightning_cxl
from lightning_cxl import UnsupportedError, residency
from lightning_cxl.streaming.unit_weights import UnitWeights
from tests.integration.llama import LlamaTask, tiny_llama, with_lora
from tests.integration.quantised import KINDS, quantise
from tests.integration.training import EXACT, assert_identical, make_trainer, offload, train
from tests.models import token_data

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("kernels_of_bitsandbytes"),
    pytest.mark.filterwarnings("ignore:.* of weights are not quantised"),
]
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NESTED = NF4 | {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
LAYERS, STEPS = 4, 4
SIZES = {
    "vocab_size": 37, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
}  # fmt: skip
LAST_TOO = {"target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tf.logging.disable_progress_bar()
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("qlora")
    tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(path, max_shard_size="50KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def theirs(folder, way):
    options = {"quantization_config": tf.BitsAndBytesConfig(**way), "device_map": {"": "cpu"}}
    return tf.AutoModelForCausalLM.from_pretrained(folder, **options)


def ours(folder, way):
    quantised = tf.BitsAndBytesConfig(**way)
    return lightning_cxl.from_pretrained(tf.AutoModelForCausalLM, folder, quantization_config=quantised)


class QLoRA(LightningModule):
    """Loads the base and adds adapters in `configure_model`; records losses of training and validation."""

    def __init__(self, load, **adapters):
        super().__init__()
        self.load, self.adapters = load, {**LAST_TOO, **adapters}
        self.model, self.losses = None, []

    def configure_model(self):
        if self.model is not None:
            return
        with torch.device("cpu"):  # plain Lightning would let the device draw the adapters
            model = self.load()
            self.at_once = {name: set(residency(p)) for name, p in model.named_parameters()}
            torch.manual_seed(1)
            config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **self.adapters)
            self.model = peft.get_peft_model(model, config)

    def loss(self, batch):
        loss = self.model(input_ids=batch[0], labels=batch[1], use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.loss(batch)

    def val_dataloader(self):
        return token_data(2)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(module, strategy):
    seed_everything(11, verbose=False)
    trainer = make_trainer(strategy, max_steps=STEPS, val_check_interval=2, num_sanity_val_steps=0)
    # by itself, bitsandbytes cannot train any more after it has evaluated on a CPU with AVX-512 BF16
    repacks = bnb.nn.modules.has_avx512bf16() and strategy != "auto"
    with mock.patch.object(bnb.nn.modules, "has_avx512bf16", lambda: repacks):
        trainer.fit(module, token_data(STEPS))
    return module.losses, {name: value.cpu().clone() for name, value in module.state_dict().items()}


def under_us(folder, way, **options):
    strategy = offload(**EXACT, **options)
    module = QLoRA(lambda: ours(folder, way))
    return fit(module, strategy), strategy, module


def test_is_the_run_without_us(folder):
    expected = fit(QLoRA(lambda: theirs(folder, NESTED)), "auto")  # loaded by transformers, moved by Lightning
    result, strategy, module = under_us(folder, NESTED)
    assert_identical(expected, result)
    assert len(set(expected[0])) == len(expected[0]) == STEPS + 2 * (STEPS // 2)
    assert strategy.report()["streamed"]["num_units"] == LAYERS
    kinds = [type(p).__name__ for p in module.model.parameters()]
    assert kinds.count("Params4bit") == 7 * LAYERS
    at_once = module.at_once.values()
    assert all(where and None not in where for where in at_once), "on their tier from the first byte"


@pytest.mark.on_cpu
def test_weights_that_are_repacked_already_are_refused(folder):
    model = ours(folder, NF4)
    model.model.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UnsupportedError, match=r"layers.1.mlp.up_proj.* evaluates with on this CPU"):
        fit(QLoRA(lambda: model), offload(**EXACT))


def test_a_layer_whose_backward_is_not_known_is_refused(folder, monkeypatch):
    class Another(bnb.autograd._functions.MatMul4Bit):
        pass

    monkeypatch.setattr(bnb.autograd._functions, "MatMul4Bit", Another)
    with pytest.raises(UnsupportedError, match="a layer of class Linear4bit computes in a way"):
        under_us(folder, NF4)
    under_us(folder, NF4, stream_weights=False)  # as the message says


def test_weights_on_ssd_are_read_and_never_written(folder, tmp_path, written):
    expected = under_us(folder, NESTED)[0]
    on_ssd = {"tiers": {"ssd": {"path": str(tmp_path / "ssd"), "budget": "64MiB"}}}
    on_ssd |= {"tier_rules": {"*": {"weights": "ssd"}}}
    result, strategy, _ = under_us(folder, NESTED, stream_weights=True, **on_ssd)
    assert_identical(expected, result)
    assert strategy.report()["planned_roles"]["compute_weights"]["ssd"] > 0
    frozen = sorted(name for name in written if name.endswith("frozen weights"))
    assert len(frozen) == len(set(frozen)) == LAYERS, "each once, when it moved there"


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
EIGHT_BIT = {"load_in_8bit": True}
MODELS_APART = {  # model, quantisation, adapters
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
MODELS_ON_CPU = {
    "4 bit that stays": ("Llama", NF4, LAST_TOO),
    "8 bit": ("Llama", EIGHT_BIT, ATTENTION),
    "8 bit, outliers": ("Llama", EIGHT_BIT | {"llm_int8_threshold": 0.5}, LAST_TOO),
    "DoRA": ("Llama", NF4, LAST_TOO | {"use_dora": True}),
}


def assert_models_train_the_same(folder, kind, way, adapters, **options):
    torch.manual_seed(3)
    tf.logging.disable_progress_bar()
    # what is trained of a 16-bit base has wider masters under us
    # and a 4-bit layer widens the biases of such a base where they do not stream
    wide = kind == "GPT-2" or not adapters.keys().isdisjoint({"bias", "modules_to_save"})
    MODELS[kind]().to(torch.float32 if wide else torch.bfloat16).save_pretrained(folder)
    runs = []
    for load, strategy in ((theirs, "auto"), (ours, offload(**EXACT, **options))):
        losses, state = fit(QLoRA(partial(load, folder, way), init_lora_weights=False, **adapters), strategy)
        # as bytes: codes in a floating-point type may be NaN
        runs.append((losses, {name: each.contiguous().view(-1).view(torch.uint8) for name, each in state.items()}))
    assert_identical(*runs)
    assert len(set(runs[0][0])) == len(runs[0][0])


@pytest.mark.parametrize("case", MODELS_APART)
def test_models_train_as_without_us(tmp_path, case):
    assert_models_train_the_same(tmp_path, *MODELS_APART[case])


@pytest.mark.on_cpu
@pytest.mark.parametrize("case", MODELS_ON_CPU)
def test_models_train_as_without_us_where_the_cpu_computes(tmp_path, case):
    assert_models_train_the_same(tmp_path, *MODELS_ON_CPU[case], stream_weights=case != "4 bit that stays")


def quantised(kind, width=64):
    model = tiny_llama(hidden_size=width)
    quantise(model, kind)
    return with_lora(model)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_a_kernel_reads_is_in_the_slot(kind, monkeypatch):
    """While a unit computes all its tensors lie in one slot; in between all of them lie in its host copy."""
    inside, outside = [], []
    enter, leave = UnitWeights.enter, UnitWeights.exit

    def is_within(tensor, memory):
        start = memory.data_ptr()
        return start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= start + memory.numel()

    def entered(unit, slot, *views):
        enter(unit, slot, *views)
        inside.extend(is_within(tensor, slot) for tensor in all_tensors(unit.module))

    def left(unit):
        leave(unit)
        outside.extend(is_within(tensor, unit.pieces[0].flat) for tensor in all_tensors(unit.module))

    monkeypatch.setattr(UnitWeights, "enter", entered)
    monkeypatch.setattr(UnitWeights, "exit", left)
    train(lambda: quantised(kind), offload(**EXACT), task=LlamaTask, steps=2)
    assert inside and all(inside) and outside and all(outside)


def all_tensors(unit):
    """Every tensor that the quantised layers of a unit hold, found without knowing their names."""
    for module in unit.modules():
        for parameter in module.parameters(recurse=False):
            yield parameter
            holders = [parameter, getattr(parameter, "quant_state", None), getattr(module, "state", None)]
            holders.append(getattr(holders[1], "state2", None))
            for holder in holders:
                values = {} if holder is None else holder.__dict__
                yield from (value for value in values.values() if isinstance(value, torch.Tensor))
