"""`plan --lora R --quantize ...` against what runs of the main job with these options hold."""

import pytest
import torch
import transformers as tf
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_cxl.commands.plan import PlannedModel, Settings
from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.machine.speeds import machine_without_speeds
from lightning_cxl.machine.topology import Topology
from lightning_cxl.text import format_bytes
from tests.integration.llama import tiny_llama
from tests.integration.training import make_trainer, offload

pytestmark = pytest.mark.usefixtures("kernels_of_bitsandbytes")
SHAPE = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024}
ROWS, TOKENS, RANK = 4, 32, 2  # inputs of units are large enough to leave the device


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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
def test_planned_bytes_of_every_role_are_what_a_run_holds(folder, quantize, precision, stream):
    machine = machine_without_speeds(Topology.detect(), "cpu")
    settings = Settings(
        batch=ROWS, sequence=TOKENS, precision=precision, lora=RANK, quantize=quantize, stream_weights=stream
    )
    planned = {role.value: n for role, n in PlannedModel(str(folder)).job(settings, machine).bytes_of().items()}
    strategy = offload(stream_weights=stream)
    lora = {"r": RANK, "target_modules": "all-linear"}
    seed_everything(1, verbose=False)
    module = Batches(str(folder), lora=lora, quantization=quantize)
    make_trainer(strategy, max_steps=2, precision=precision).fit(module)
    report = strategy.report()
    held = {role: sum(tiers.values()) for role, tiers in report["peak_roles"].items() if sum(tiers.values())}
    unit = report["streamed"]["host_bytes"] / 4 if stream else 0  # is there twice while it moves
    held["compute_weights"] -= unit
    assert {"compute_weights", "momentum", "variance"} <= planned.keys()
    assert planned == pytest.approx(held, rel=0.03)
    full = sum(p.numel() for p in tiny_llama(4, **SHAPE).parameters()) * (4 if precision == "32-true" else 2)
    assert (planned["compute_weights"] < 0.7 * full) == (quantize is not None)


@pytest.mark.on_cpu
@pytest.mark.full
def test_experts_are_run_without_values_and_stay_wide_with_a_word(tmp_path):
    shape = {**SHAPE, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tf.MixtralForCausalLM(tf.MixtralConfig(**shape, num_local_experts=8))
    model.bfloat16().save_pretrained(tmp_path)
    machine = machine_without_speeds(Topology.detect(), "cpu")

    def planned(**options):
        settings = Settings(batch=ROWS, sequence=TOKENS, **options)
        return PlannedModel(str(tmp_path)).job(settings, machine)

    full, adapters, quantised = planned(), planned(lora=RANK), planned(lora=RANK, quantize="4bit")
    assert not full.notes and not adapters.notes  # which say what could not be run without values
    # peft multiplies the adapters of all experts, of gate and up with twice the rank; torch tries it once more first
    width, hidden = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    products = 4 * 8 * 2 * (width * 2 * hidden * 2 * RANK + width * hidden * RANK)
    assert adapters.forward_flops - full.forward_flops == pytest.approx(2 * products, rel=0.05)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    (note,) = quantised.notes
    assert note.startswith(f"{format_bytes(experts)} of ") and "MixtralExperts" in note and "not quantised" in note
    with pytest.warns(LightningCXLWarning, match=f"{format_bytes(experts)} of .* are not quantised"):
        module = Batches(str(tmp_path), lora={"r": RANK, "target_modules": ["q_proj"]}, quantization="4bit")
        make_trainer(offload(), max_steps=1, precision="bf16-true").fit(module)
