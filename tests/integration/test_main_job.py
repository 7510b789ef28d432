"""The main job with adapters and a quantised base: as without us, resumed, exported, planned; samples meanwhile."""

import json

import peft
import pytest
import torch
import transformers as tf
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_cxl.commands.export import export_checkpoint
from lightning_cxl.commands.plan import PlannedModel, Settings
from lightning_cxl.errors import CheckpointError, ConfigError
from lightning_cxl.finetune.cli import Summary
from lightning_cxl.finetune.data import TextData
from lightning_cxl.finetune.evaluation_samples import EvaluationSamples
from lightning_cxl.finetune.export import ExportPretrained
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.machine.speeds import machine_without_speeds
from lightning_cxl.machine.topology import Topology
from lightning_cxl.sequences.packing import packed_arguments
from tests.integration.llama import tiny_llama
from tests.integration.training import EXACT, make_trainer, offload, weights_of
from tests.unit.finetune.chats import MARKED, byte_tokenizer
from tests.unit.finetune.test_model import Losses

bnb = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.usefixtures("kernels_of_bitsandbytes")
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
STEPS = 6


def chats_of(folder):
    path = str(folder / "chats.jsonl")
    return TextData(path, seq_len=128, batch_size=2, val_fraction=0.2, tokenizer_name_or_path=str(folder), seed=1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_CXL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "base"
    torch.manual_seed(3)
    sizes = {"vocab_size": 262, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = tf.LlamaConfig(**sizes, num_hidden_layers=3, tie_word_embeddings=True)
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(MARKED).save_pretrained(folder)
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(30)]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def fit(model, data, strategy, *callbacks, steps=STEPS, ckpt_path=None, **options):
    seed_everything(11, verbose=False)
    losses = Losses()
    trainer = make_trainer(strategy, max_steps=steps, callbacks=[losses, *callbacks], **options)
    if strategy == "auto":  # plain Lightning would let the device draw the adapters
        model.configure_model()
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return losses.values, weights_of(model)


WAYS = {
    "lora": {},
    "qlora": {"quantization": "4bit"},
    "own fields": {"quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}},
}


def module(folder, way="qlora", **options):
    return CausalLM(str(folder), **{"lora": LORA, "lr": 1e-2, **WAYS[way], **options})


@pytest.mark.parametrize("way", WAYS)
def test_adapters_train_as_without_us(folder, way):
    expected = fit(module(folder, way), chats_of(folder), "auto")
    model = module(folder, way)
    found = fit(model, chats_of(folder), offload(stream_weights=True, **EXACT))
    assert found[0] == expected[0] and len(set(found[0])) == STEPS
    assert found[1].keys() == expected[1].keys()
    assert [name for name, value in expected[1].items() if not torch.equal(value, found[1][name])] == []
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * 3 and all("lora_" in name for name in trained)
    quantised = [p for p in model.parameters() if type(p).__name__ == "Params4bit"]
    assert len(quantised) == (0 if way == "lora" else 7 * 3)
    if way == "qlora":
        state = quantised[0].quant_state
        assert (state.quant_type, state.nested, state.dtype) == ("nf4", True, torch.float32)
    assert packed_arguments(model.model, torch.arange(4)[None]) is not None


@pytest.mark.parametrize("options", [EXACT, {"stream_weights": True, "on_overflow": "ignore"}], ids=str)
def test_a_checkpoint_has_adapters_alone_and_resumes_exactly(folder, tmp_path, options):
    saves = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=STEPS // 2, save_top_k=-1)
    straight, weights = fit(module(folder), chats_of(folder), offload(**options), saves, enable_checkpointing=True)
    path = tmp_path / "saved" / f"step={STEPS // 2}.ckpt"
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert len(saved) == 2 * 7 * 3 and all("lora_" in name for name in saved)
    rest, resumed = fit(module(folder), chats_of(folder), offload(**options), ckpt_path=path)
    assert rest == straight[STEPS // 2 :]
    assert [name for name, value in weights.items() if not torch.equal(value, resumed[name])] == []
    for changed, message in (({"target_modules": ["q_proj"]}, "names differ"), ({"lora_alpha": 16}, "'lora_alpha': 8")):
        with pytest.raises(CheckpointError, match=message):
            fit(module(folder, lora={**LORA, **changed}), chats_of(folder), offload(**options), ckpt_path=path)
    with pytest.warns(UserWarning, match="not in the checkpoint"):  # Lightning names the base's weights
        loaded = CausalLM.load_from_checkpoint(path)
    assert all(torch.equal(value, loaded.state_dict()[name].cpu()) for name, value in saved.items())


@pytest.mark.parametrize("options", [EXACT, {"stream_weights": True, "on_overflow": "ignore"}], ids=str)
def test_exports_of_a_run_are_the_adapter_and_the_merged_model(folder, tmp_path, options):
    exports = ExportPretrained(str(tmp_path / "adapter"))
    saves = ModelCheckpoint(tmp_path / "saved", filename="last", every_n_train_steps=STEPS)
    model = module(folder)
    fit(model, chats_of(folder), offload(**options), exports, saves, enable_checkpointing=True)
    plain = tf.AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    state = model.model.state_dict()
    lora = {name: value for name, value in adapted.state_dict().items() if "lora_" in name}
    assert len(lora) == 2 * 7 * 3
    assert all(torch.equal(value, state[name].cpu()) for name, value in lora.items())
    assert any(value.any() for name, value in lora.items() if "lora_B" in name)
    assert not (tmp_path / "adapter" / "config.json").exists()
    assert tf.AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template == MARKED

    exported = export_checkpoint(tmp_path / "saved" / "last.ckpt", tmp_path / "merged")  # needs nothing else
    assert "merged an adapter into 21 layers" in exported.notes
    merged, expected = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), adapted.merge_and_unload()
    assert all(torch.equal(value, merged.state_dict()[name]) for name, value in expected.state_dict().items())
    assert not hasattr(merged.config, "quantization_config")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    export_checkpoint(tmp_path / "saved" / "last.ckpt", tmp_path / "alone", only_adapter=True)
    alone = peft.PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "alone")
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in lora.items())


@pytest.mark.parametrize(
    ("lora", "options"), [(None, EXACT), (LORA, {"stream_weights": True, "on_overflow": "ignore"})], ids=["all", "lora"]
)
def test_samples_while_weights_stream_leave_the_run_as_it_is(folder, lora, options, capsys):
    def run(*callbacks):
        model = CausalLM(str(folder), lora=lora, lr=1e-2)
        return fit(model, chats_of(folder), offload(**options), *callbacks, val_check_interval=2)

    plain = run()
    summary = Summary(max_new_tokens=3)
    shown = run(EvaluationSamples(count=1, max_new_tokens=3), summary)
    assert shown[0] == plain[0]
    assert [name for name, value in plain[1].items() if not torch.equal(value, shown[1][name])] == []
    assert capsys.readouterr().out.count("held-out sample 1") == STEPS // 2
    assert "What is " in summary.sample


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name_or_path": None, "quantization": None}, "lora needs a model to adapt"),
        ({"name_or_path": "Qwen/Qwen2.5-7B"}, "download a model first"),
        ({"quantization": "3bit"}, 'must be "4bit", "8bit" or fields'),
        ({"quantization": {"load_in_9bit": True}}, "no field load_in_9bit"),
        ({"lora": {"target_modules": ["nothing"]}}, "peft does not take the options .*nothing"),
        ({"lora": None}, "quantised weights cannot be trained: give model.lora"),
    ],
)
def test_what_cannot_be_is_refused(folder, options, message):
    given = {"name_or_path": str(folder), "lora": LORA, "quantization": "4bit", **options}
    with pytest.raises(ConfigError, match=message):
        fit(CausalLM(**given), chats_of(folder), "auto")


SHAPE = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024}
ROWS, TOKENS, RANK = 4, 32, 2  # inputs of units are large enough to leave the device


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    tiny_llama(4, **SHAPE).save_pretrained(path)
    return path


class Batches(CausalLM):
    def train_dataloader(self):
        rows = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
        return DataLoader([{"input_ids": rows, "labels": rows}] * 2, batch_size=None)


@pytest.mark.on_cpu
@pytest.mark.parametrize(
    ("quantize", "precision", "stream"),
    [
        (None, "bf16-true", False),
        ("4bit", "32-true", False),
        ("4bit", "bf16-true", True),
        ("8bit", "bf16-true", True),
        ("8bit", "32-true", False),
    ],
)
def test_planned_bytes_of_every_role_are_what_a_run_holds(base, quantize, precision, stream):
    machine = machine_without_speeds(Topology.detect(), "cpu")
    settings = Settings(
        batch=ROWS, sequence=TOKENS, precision=precision, lora=RANK, quantize=quantize, stream_weights=stream
    )
    planned = {role.value: n for role, n in PlannedModel(str(base)).job(settings, machine).bytes_of().items()}
    strategy = offload(stream_weights=stream)
    lora = {"r": RANK, "target_modules": "all-linear"}
    seed_everything(1, verbose=False)
    module = Batches(str(base), lora=lora, quantization=quantize)
    make_trainer(strategy, max_steps=2, precision=precision).fit(module)
    report = strategy.report()
    held = {role: sum(tiers.values()) for role, tiers in report["peak_roles"].items() if sum(tiers.values())}
    unit = report["streamed"]["host_bytes"] / 4 if stream else 0  # is there twice while it moves
    held["compute_weights"] -= unit
    assert {"compute_weights", "momentum", "variance"} <= planned.keys()
    assert planned == pytest.approx(held, rel=0.03)
    full = sum(p.numel() for p in tiny_llama(4, **SHAPE).parameters()) * (4 if precision == "32-true" else 2)
    assert (planned["compute_weights"] < 0.7 * full) == (quantize is not None)
