"""`verify`: a model that trains as without offload is equal; whatever goes wrong is found, and the place is named."""

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from lightning_cxl.commands import verify
from lightning_cxl.errors import ConfigError
from lightning_cxl.gradients.guard import GradientMeter
from lightning_cxl.optim import cpu_adam
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.run import user_loop
from lightning_cxl.streaming import activations
from lightning_cxl.streaming.activations import UnitInput
from lightning_cxl.streaming.replay import ModuleState
from lightning_cxl.streaming.unit_weights import Slot
from lightning_cxl.weights.hf import with_adapters

SCRIPTS = {path.stem: path for path in (Path(__file__).parents[2] / "fixtures" / "scripts").glob("*.py")}


@pytest.fixture
def ask(tmp_path, on_device, capsys):
    """Return a function that verifies a tiny model: exit status, and what --json has by the name of the check."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"vocab_size": 700, "num_hidden_layers": 9, "attention_dropout": 0.2, "pad_token_id": None}
    # peft keeps the frames in which it first looked for kernels that are not there, and all that they hold
    with_adapters(LlamaForCausalLM(LlamaConfig(**shape)), {"r": 1, "target_modules": "all-linear"})

    def run(*options, model="llama"):
        given = ["--json", str(tmp_path / "found.json")]
        if model in SCRIPTS:
            given += ["--script", str(SCRIPTS[model])]
        else:
            AutoConfig.for_model(model, **shape).save_pretrained(tmp_path)
            given += ["--model", str(tmp_path), "--blocks", "4", "--seq", "8"]
        status = verify.main([*given, *options])
        found = json.loads((tmp_path / "found.json").read_text())
        assert ("WRONG" in capsys.readouterr().out) is not found["is_right"]
        assert found["is_right"] is (status == 0)
        return status, {check["name"]: (check["verdict"], check["detail"]) for check in found["checks"]}

    return run


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(verify, "_ADAM_ELEMENTS", 1 << 12)
    monkeypatch.setattr(sys, "path", [*sys.path])  # which --script adds a folder to
    monkeypatch.setattr(sys, "argv", ["lightning_cxl", "verify", "--clip", "1"])


@pytest.mark.parametrize(
    "options",
    [
        ["--precision", "32-true"],
        pytest.param(["--precision", "bf16-true", "--accumulate-grad-batches", "3"], marks=pytest.mark.full),
        pytest.param(["--precision", "bf16-true", "--lora", "4"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_a_model_is_equal_with_offload(ask, options):
    status, found = ask(*options)
    assert status == 0
    assert [verdict for verdict, _ in found.values()] == ["ok"] * 5 + ["measured"] * 2
    assert {"weights stream", "weights stay on the device", "resumed in the middle"} <= found.keys()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("contrast", ["--accumulate-grad-batches", "1"]),
        ("conv", []),
        ("tied", ["--precision", "bf16-mixed", "--units", "Block"]),
    ],
)
def test_a_model_of_a_script_is_equal_with_offload(ask, name, options):
    status, found = ask(*options, model=name)
    assert status == 0
    assert [verdict for verdict, _ in found.values()] == ["ok"] * 5 + ["measured"] * 2
    assert float(re.search(r"h2d (\S+) GB/s", found["overlap"][1])[1]) > 0  # weights did stream


def drops_a_sum(patch):
    plain = GradientMeter.accumulate_all
    patch.setattr(GradientMeter, "accumulate_all", lambda self, additions: plain(self, additions[1:]))


def computes_with_old_weights(patch):
    patch.setattr(Slot, "is_image_of", lambda self, unit: self.unit is unit)


def loses_an_input(patch):
    plain = UnitInput.load

    def load(self, engine):
        loaded = plain(self, engine)
        return torch.zeros_like(loaded).requires_grad_(loaded.requires_grad)

    patch.setattr(UnitInput, "load", load)


def loads_no_state(patch):
    patch.setattr(user_loop._LoadStateDict, "__call__", lambda self, state: None)


def takes_another_rate(patch):
    plain = cpu_adam.scalars_of
    patch.setattr(
        cpu_adam, "scalars_of", lambda group, step, scale: plain({**group, "lr": 30 * group["lr"]}, step, scale)
    )


def is_on_another_tier(patch):
    patch.setattr(verify, "residency", lambda tensor: {"elsewhere": tensor.nbytes})


def leaves_a_weight_out(patch):
    plain = MasterWeights.write_back
    patch.setattr(MasterWeights, "write_back", lambda self, masters, **how: plain(self, list(masters)[1:], **how))


def recomputes_with_other_random_numbers(patch):
    plain = activations.checkpoint
    patch.setattr(activations, "checkpoint", lambda *args, **how: plain(*args, **how, preserve_rng_state=False))


def forgets_what_blocks_count(patch):
    """Batch norm counts a batch twice, in the forward and in the recompute."""
    patch.setattr(ModuleState, "replay", lambda self: nullcontext())


FAULTS = {
    drops_a_sum: ("llama", "weights stream", "step 0: gradient of `"),
    computes_with_old_weights: ("llama", "weights stream", "micro-batch 2: output of `model.layers.0"),
    loses_an_input: ("llama", "weights stream", "step 0: gradient of `model.layers."),
    leaves_a_weight_out: ("llama", "weights stay on the device", "step 0: weight `"),
    recomputes_with_other_random_numbers: ("llama", "weights stream", "step 0: gradient of `"),
    loads_no_state: ("tied", "resumed in the middle", "step 2: weight `"),
    takes_another_rate: ("llama", "CPUAdam, updates behind the training", "losses differ"),
    is_on_another_tier: ("llama", "pages are where the plan has them", "on `elsewhere`"),
    forgets_what_blocks_count: ("conv", "weights stream", "step 0: buffer `layer2."),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_goes_wrong_is_found_and_named(ask, fault, monkeypatch):
    fault(monkeypatch)
    model, check, place = FAULTS[fault]
    status, found = ask(*(["--precision", "32-true"] if model == "llama" else []), model=model)
    assert status == 1
    assert found[check][0] == "WRONG" and place in found[check][1], found


GOOD = {
    "import": "import torch; from torch import nn",
    "model": "def model(): return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))",
    "batch": "def batch(number): return torch.rand(3, 2)",
    "loss": "def loss(model, batch): return model(batch).sum()",
}


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        ({}, [], None),
        ({"loss": ""}, [], r"must be one number that has a gradient, got a tensor of shape \[3, 2\]"),
        (
            {"loss": "def loss(model, batch): return model(batch).sum() * 1e30 * 1e30"},
            [],
            "^the loss in step 0 is not finite without offload, too: scale the loss down",
        ),
        ({}, ["--units", "Conv2d"], "units: `Conv2d` matches no module name and no class"),
    ],
)
def test_what_a_script_lacks_is_said_before_anything_is_compared(tmp_path, on_device, capsys, change, options, says):
    file = tmp_path / "file.py"
    file.write_text("\n".join((GOOD | change).values()))
    if says is None:
        assert verify.main(["--script", str(file), *options]) == 0
        return
    with pytest.raises(ConfigError, match=says):
        verify.main(["--script", str(file), *options])
    sys.modules.pop("lightning_cxl_script", None)  # it may have a model
    assert " ok " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "options", "differs"),
    [
        (
            {
                "batch": "from collections import UserDict\ndef batch(number): return UserDict(input=torch.rand(3, 2))",
                "loss": "def loss(model, batch): return model(**batch).sum()",
            },
            ["--precision", "bf16-true"],
            None,
        ),
        (
            {
                "loss": "def loss(model, batch):\n    model.count = getattr(model, 'count', 0) + 1\n"
                "    return model(batch).sum() * model.count"
            },
            [],
            ("resumed in the middle", "skipped", r"not the same without offload, too; .*micro-batch 4: loss"),
        ),
    ],
    ids=["no pytree", "state of its own"],
)
def test_what_a_script_may_do(tmp_path, on_device, capsys, change, options, differs):
    file = tmp_path / "file.py"
    file.write_text("\n".join((GOOD | change).values()) + "\nprint('hello')")
    assert verify.main(["--script", str(file), "--json", "-", *options]) == 0
    sys.modules.pop("lightning_cxl_script", None)
    said = capsys.readouterr()
    assert said.err.startswith("hello\n")
    ending = "all is equal" if differs is None else "all that was compared is equal; 1 was skipped"
    assert said.err.endswith(f"{ending}\n")
    found = {check["name"]: check for check in json.loads(said.out)["checks"]}
    if differs is not None:
        name, verdict, detail = differs
        check = found.pop(name)
        assert check["verdict"] == verdict and re.search(detail, check["detail"]), check
    assert {check["verdict"] for check in found.values()} == {"ok", "measured"}


def test_a_script_that_is_none_is_refused(tmp_path):
    for path in (tmp_path / "none.py", tmp_path):
        with pytest.raises(ConfigError, match=r"is no Python file\. The file of --script defines model\(\)"):
            verify.main(["--script", str(path)])
    with pytest.raises(SystemExit):
        verify.main(["--script", "a.py", "--model", "gpt2"])
