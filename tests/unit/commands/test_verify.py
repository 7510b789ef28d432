"""`verify`: a model that trains as without offload is equal; whatever goes wrong is found, and the place is named."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cxl.commands import verify
from lightning_cxl.gradients.guard import GradientMeter
from lightning_cxl.optim import cpu_adam
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.run import user_loop
from lightning_cxl.streaming.activations import UnitInput
from lightning_cxl.streaming.unit_weights import Place, Slot
from lightning_cxl.weights.hf import with_adapters


@pytest.fixture
def ask(tmp_path, on_device, capsys):
    """Return a function that verifies a tiny model: exit status, and what --json has by the name of the check."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=700, num_hidden_layers=9, attention_dropout=0.2, **shape)
    config.save_pretrained(tmp_path)
    # peft keeps the frames in which it first looked for kernels that are not there, and all that they hold
    with_adapters(LlamaForCausalLM(config), {"r": 1, "target_modules": "all-linear"})

    def run(*options):
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


FAULTS = {
    drops_a_sum: ("weights stream", "step 0: gradient of `"),
    computes_with_old_weights: ("weights stream", "micro-batch 2: output of `model.layers.0"),
    shows_another_place: ("weights stream", "micro-batch 0: output of `model.layers.0.input_layernorm`"),
    loses_an_input: ("weights stream", "step 0: gradient of `model.layers."),
    leaves_the_device_behind: ("weights stream", "step 0: weight `"),
    loads_no_state: ("resumed in the middle", "step 2: weight `"),
    takes_another_rate: ("CPUAdam, updates behind the training", "losses differ"),
    makes_no_numbers: ("CPUAdam, updates behind the training", "losses differ by nan"),
    is_on_another_tier: ("pages are where the plan has them", "on `elsewhere`"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_goes_wrong_is_found_and_named(ask, fault, monkeypatch):
    fault(monkeypatch)
    status, found = ask("--precision", "32-true")
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
