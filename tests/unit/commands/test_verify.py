"""`verify`: a model that trains as without offload is equal; whatever goes wrong is found, and the place is named."""

import json

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from lightning_cxl.commands import verify
from lightning_cxl.gradients.guard import GradientMeter
from lightning_cxl.optim import cpu_adam
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.run import user_loop
from lightning_cxl.streaming import activations
from lightning_cxl.streaming.activations import UnitInput
from lightning_cxl.streaming.unit_weights import Place, Slot
from lightning_cxl.weights.hf import with_adapters


@pytest.fixture
def ask(tmp_path, on_device, capsys):
    """Return a function that verifies a tiny model: exit status, and what --json has by the name of the check."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"vocab_size": 700, "num_hidden_layers": 9, "attention_dropout": 0.2, "pad_token_id": None}
    # peft keeps the frames in which it first looked for kernels that are not there, and all that they hold
    with_adapters(LlamaForCausalLM(LlamaConfig(**shape)), {"r": 1, "target_modules": "all-linear"})

    def run(*options, model="llama"):
        AutoConfig.for_model(model, **shape).save_pretrained(tmp_path)
        given = ["--model", str(tmp_path), "--blocks", "4", "--seq", "8", "--json", str(tmp_path / "found.json")]
        status = verify.main([*given, *options])
        found = json.loads((tmp_path / "found.json").read_text())
        assert ("WRONG" in capsys.readouterr().out) is not found["is_right"]
        assert found["is_right"] is (status == 0)
        return status, {check["name"]: (check["verdict"], check["detail"]) for check in found["checks"]}

    return run


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(verify, "_ADAM_ELEMENTS", 1 << 12)


@pytest.mark.parametrize(
    "options",
    [
        ["--precision", "32-true"],
        pytest.param(["--precision", "bf16-true", "--accumulate-grad-batches", "3"], marks=pytest.mark.full),
        pytest.param(["--precision", "bf16-mixed", "--clip", "0"], marks=pytest.mark.full),
        pytest.param(["--precision", "bf16-true", "--lora", "4"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_a_model_is_equal_with_offload(ask, options):
    status, found = ask(*options)
    assert status == 0
    assert [verdict for verdict, _ in found.values()] == ["ok"] * 5 + ["measured"] * 2
    assert {"weights stream", "weights stay on the device", "resumed in the middle"} <= found.keys()


def drops_a_sum(patch):
    plain = GradientMeter.accumulate_all
    patch.setattr(GradientMeter, "accumulate_all", lambda self, additions: plain(self, additions[1:]))


def computes_with_old_weights(patch):
    patch.setattr(Slot, "is_image_of", lambda self, unit: self.unit is unit)


def shows_another_place(patch):
    plain = Place.show

    def show(self, slot=None):
        plain(self, slot)
        if slot is not None and self.host.dim() == 1:
            self.parameter.data = self.parameter.data.flip(0).contiguous() + 1

    patch.setattr(Place, "show", show)


def loses_an_input(patch):
    plain = UnitInput.load

    def load(self, engine):
        loaded = plain(self, engine)
        return torch.zeros_like(loaded).requires_grad_(loaded.requires_grad)

    patch.setattr(UnitInput, "load", load)


def leaves_the_device_behind(patch):
    patch.setattr(MasterWeights, "_write", lambda self, pair: None)


def loads_no_state(patch):
    patch.setattr(user_loop._LoadStateDict, "__call__", lambda self, state: None)


def takes_another_rate(patch):
    plain = cpu_adam.scalars_of
    patch.setattr(
        cpu_adam, "scalars_of", lambda group, step, scale: plain({**group, "lr": 30 * group["lr"]}, step, scale)
    )


def makes_no_numbers(patch):
    plain = cpu_adam.scalars_of
    patch.setattr(cpu_adam, "scalars_of", lambda group, step, scale: plain({**group, "lr": float("nan")}, step, scale))


def is_on_another_tier(patch):
    patch.setattr(verify, "residency", lambda tensor: {"elsewhere": tensor.nbytes})


def adds_twice(patch):
    plain = GradientMeter.accumulate_all
    patch.setattr(
        GradientMeter, "accumulate_all", lambda self, additions: (plain(self, additions), plain(self, additions))
    )


def adds_all_but_the_last_number(patch):
    plain = GradientMeter.accumulate_all

    def accumulate_all(self, additions):
        before = additions[0].accumulator.view(-1)[-1].clone()
        plain(self, additions)
        additions[0].accumulator.view(-1)[-1] = before

    patch.setattr(GradientMeter, "accumulate_all", accumulate_all)


def shifts_a_unit(patch):
    plain = Slot.wait

    def wait(self):
        plain(self)
        self.memory.copy_(self.memory.roll(4))

    patch.setattr(Slot, "wait", wait)


def mixes_rows_of_an_input(patch):
    plain = UnitInput.load

    def load(self, engine):
        loaded = plain(self, engine)
        return loaded.detach().flip(1).requires_grad_(loaded.requires_grad)

    patch.setattr(UnitInput, "load", load)


def rounds_weights_on_the_device(patch):
    plain = MasterWeights._write

    def write(self, pair):
        plain(self, pair)
        pair.settle()
        with torch.no_grad():
            pair.compute.copy_(pair.compute.bfloat16())

    patch.setattr(MasterWeights, "_write", write)


def leaves_a_weight_out(patch):
    plain = MasterWeights.write_back
    patch.setattr(MasterWeights, "write_back", lambda self, masters, **how: plain(self, list(masters)[1:], **how))


def recomputes_with_other_random_numbers(patch):
    plain = activations.checkpoint
    patch.setattr(activations, "checkpoint", lambda *args, **how: plain(*args, **how, preserve_rng_state=False))


def changed_state(patch, name, change):
    plain = user_loop._LoadStateDict.__call__

    def load(self, state):
        entries = {key: {**entry, name: change(entry[name])} for key, entry in state["state"].items()}
        return plain(self, {**state, "state": entries})

    patch.setattr(user_loop._LoadStateDict, "__call__", load)


def forgets_how_many_steps_were_made(patch):
    changed_state(patch, "step", lambda value: value * 0 + 1)


def resumes_without_momentum(patch):
    changed_state(patch, "exp_avg", torch.zeros_like)


def resumes_with_a_rounded_variance(patch):
    changed_state(patch, "exp_avg_sq", lambda value: value.bfloat16().float())


def counts_steps_wrong(patch):
    plain = cpu_adam.scalars_of
    patch.setattr(cpu_adam, "scalars_of", lambda group, step, scale: plain(group, step + 50, scale))


def has_no_momentum(patch):
    plain = cpu_adam.scalars_of
    patch.setattr(cpu_adam, "scalars_of", lambda group, step, scale: plain({**group, "betas": (0.0, 0.0)}, step, scale))


FAULTS = {
    drops_a_sum: ("weights stream", "step 0: gradient of `"),
    computes_with_old_weights: ("weights stream", "micro-batch 2: output of `model.layers.0"),
    shows_another_place: ("weights stream", "micro-batch 0: output of `model.layers.0.input_layernorm`"),
    loses_an_input: ("weights stream", "step 0: gradient of `model.layers."),
    leaves_the_device_behind: ("weights stream", "step 0: weight `"),
    loads_no_state: ("resumed in the middle", "step 2: weight `"),
    takes_another_rate: ("CPUAdam, updates behind the training", "losses differ"),
    adds_twice: ("weights stream", "step 0: gradient of `"),
    adds_all_but_the_last_number: ("weights stream", "step 0: gradient of `"),
    shifts_a_unit: ("weights stream", "micro-batch 0: output of `"),
    mixes_rows_of_an_input: ("weights stream", "step 0: gradient of `"),
    rounds_weights_on_the_device: ("weights stay on the device", "step 0: weight `"),
    leaves_a_weight_out: ("weights stay on the device", "step 0: weight `"),
    recomputes_with_other_random_numbers: ("weights stream", "step 0: gradient of `"),
    forgets_how_many_steps_were_made: ("resumed in the middle", "step 2: weight `"),
    resumes_without_momentum: ("resumed in the middle", "step 2: weight `"),
    resumes_with_a_rounded_variance: ("resumed in the middle", "step 2: weight `"),
    counts_steps_wrong: ("CPUAdam, updates behind the training", "losses differ"),
    has_no_momentum: ("CPUAdam, updates behind the training", "losses differ"),
    makes_no_numbers: ("CPUAdam, updates behind the training", "losses differ by nan"),
    is_on_another_tier: ("pages are where the plan has them", "on `elsewhere`"),
}


MODELS = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi", "phi3", "starcoder2", "olmo", "olmo2", "cohere"),
    *("stablelm", "gpt_neox", "gpt2", "opt", "bloom", "falcon", "granite", "smollm3", "glm"),
)


@pytest.mark.parametrize(
    ("fault", "model"),
    [
        *((fault, "llama") for fault in FAULTS),
        # a fault in each model
        *(pytest.param(*pair, marks=pytest.mark.full) for pair in zip(FAULTS, MODELS, strict=True)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_goes_wrong_is_found_and_named(ask, fault, model, monkeypatch):
    fault(monkeypatch)
    status, found = ask("--precision", "32-true", model=model)
    check, place = FAULTS[fault]
    assert status == 1
    assert found[check][0] == "WRONG" and place in found[check][1], found


def test_a_difference_is_named_where_it_begins():
    same = [("output of `a`", 1), ("output of `b`", 2)]
    assert verify.first_difference(same, same) is None
    assert verify.first_difference([("output of `a`", 1), ("output of `b`", 3)], same) == "output of `b`"
    assert "was not computed" in verify.first_difference([("output of `c`", 1)], same)
    assert "1 values" in verify.first_difference(same[:1], same)
    assert verify.checksum(torch.tensor([0.0])) != verify.checksum(torch.tensor([-0.0]))
