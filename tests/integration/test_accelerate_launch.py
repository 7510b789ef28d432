"""`accelerate launch` with a script of the user's, whose options are in a YAML file and in variables."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from lightning_cxl.errors import ConfigError
from tests.integration.accelerate_loop import make_accelerator

pytestmark = pytest.mark.on_cpu
SCRIPT = """
    import json
    import sys

    import torch

    from lightning_cxl.accelerate import CXLAccelerator

    accelerator = CXLAccelerator(offload="options.yaml")
    model = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3))
    model = torch.nn.Sequential(*model)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    report = accelerator.report()
    with open("report.json", "w") as file:
        json.dump([report["config"], report["optimizers"], accelerator.mixed_precision], file)
"""


@pytest.mark.slow
def test_a_script_that_is_launched(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "options.yaml").write_text("tiers: {dram: 64MiB}\nstate: bf16\n")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")},
        "PYTHONPATH": root,
        "LIGHTNING_CXL_STREAM_WEIGHTS": "true",
        "LIGHTNING_CXL_STATE": "fp32",  # the file is the program's, and wins
    }
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    done = subprocess.run(
        [*launch, "--mixed_precision", "bf16", "script.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    config, optimizers, precision = json.loads((tmp_path / "report.json").read_text())
    assert config["tiers"] == {"value": {"dram": "64MiB"}, "origin": "argument"}
    assert config["state"] == {"value": "bf16", "origin": "argument"}
    assert config["stream_weights"] == {"value": True, "origin": "environment"}
    assert "bf16 state" in optimizers[0] and precision == "bf16"


def test_options_of_the_environment(monkeypatch):
    monkeypatch.setenv("LIGHTNING_CXL_CPU_ADAM", "false")
    accelerator = make_accelerator(None)
    assert accelerator.offload.session.config.cpu_adam is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list", "must map names of options"),
        ("no_such_option: 1", "unknown option 'no_such_option'"),
        ("tiers: {", "cannot read the options"),
        (None, "cannot read the options"),
    ],
)
def test_a_file_that_is_no_good(text, message, tmp_path):
    path = tmp_path / "options.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        make_accelerator(path)
