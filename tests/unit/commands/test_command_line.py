import errno
import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

import lightning_cxl
from lightning_cxl import __main__ as front
from lightning_cxl.commands.convert import convert, main
from lightning_cxl.commands.env import advice, environment_report, format_environment
from lightning_cxl.commands.parsers import COMMANDS
from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError


def run(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, text=True, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})


ANSWERED_AT_ONCE = [
    (["--help"], 0, "calibrate"),
    (["--version"], 0, f"lightning_cxl {lightning_cxl.__version__}"),
    (["help", "plan"], 0, "usage: python -m lightning_cxl plan "),
    *(([name, "--help"], 0, f"example: python -m lightning_cxl {name}") for name in COMMANDS),
    (["plan", "--sqe", "3"], 2, "required: --model"),
    (["fitt"], 2, "did you mean `fit`?"),
]


@pytest.mark.parametrize(("arguments", "status", "text"), ANSWERED_AT_ONCE)
def test_help_and_wrong_options_import_no_torch(arguments, status, text):
    shown = run("-X", "importtime", "-m", "lightning_cxl", *arguments, stderr=subprocess.STDOUT)
    assert shown.returncode == status and text in shown.stdout
    assert not re.search(r"\| +(torch|lightning|numpy|transformers)$", shown.stdout, re.MULTILINE)


@pytest.fixture
def ending(monkeypatch):
    """Runs a command that raises what is given, or returns it; returns what the process would end with."""

    def run(result, name="plan"):
        def main(arguments):
            assert arguments == ["--model", "gpt2"]
            if isinstance(result, BaseException):
                raise result
            return result() if callable(result) else result

        monkeypatch.setattr(sys, "argv", ["lightning_cxl", name, "--model", "gpt2"])
        monkeypatch.setattr(front.importlib, "import_module", lambda module: types.SimpleNamespace(main=main))
        front.main()

    return run


def test_errors_and_ctrl_c_are_one_message(ending, capsys):
    for error, message in (
        (ConfigError("no such policy"), "ConfigError: no such policy"),
        (ModuleNotFoundError("x", name="datasets"), "`python -m lightning_cxl plan` needs .*pip install datasets"),
        (OSError(errno.ENOSPC, "No space left on device"), "`python -m lightning_cxl plan` cannot go on: .*No space"),
        (KeyboardInterrupt(), "^130$"),
    ):
        with pytest.raises(SystemExit, match=message):
            ending(error)
    assert capsys.readouterr().err == "`python -m lightning_cxl plan` was interrupted\n"


@pytest.mark.parametrize("name", ["fit", "predict", "verify"])
@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("of the user's loader")])
def test_errors_inside_of_training_keep_their_traceback(ending, error, name):
    with pytest.raises(type(error)):
        ending(error, name)


FIXTURES = Path(__file__).parents[2] / "fixtures" / "sysfs"


def test_report_and_text_of_a_machine_with_two_cards():
    report = environment_report(FIXTURES / "3node")
    tiers = [(tier["name"], tier["node_ids"], tier["emulated"]) for tier in report["tiers"]]
    assert tiers == [("dram", [0], False), ("cxl", [1, 2], False)]
    assert json.loads(json.dumps(report)) == report
    text = format_environment({**report, "limits": {**report["limits"], "memlock_bytes": 8 << 20}})
    for shown in ("cxl: 2.0 GiB on nodes 1, 2 (57.3 GB/s read, 250 ns)", "memlock: 8.0 MiB"):
        assert shown in text


def test_advice_where_something_is_to_be_changed_only():
    healthy = environment_report(FIXTURES / "3node")
    healthy["limits"]["memlock_bytes"], healthy["kernel"]["numa_balancing"] = None, "0"
    assert advice(healthy) == []
    healthy["limits"]["memlock_bytes"] = 65536
    (text,) = advice(healthy)
    assert re.search("limited to 64.0 KiB.*ulimit -l unlimited", text)


NVME = {"device": "nvme", "nvme_path": "/local_nvme"}
CPU = {"device": "cpu", "pin_memory": True}
# what is given, options of the strategy, arguments of the Trainer
FILES = {
    "stage 3 on drives": (
        {
            "bf16": {"enabled": True}, "train_batch_size": "auto", "gradient_clipping": "auto",
            "zero_optimization": {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME},
        },
        {"tiers": {"ssd": {"path": ["/local_nvme"]}}}, {"precision": "bf16-true"},
    ),
    "stage 2": (
        {
            "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "bf16": {"enabled": "auto"},
            "fp16": {"enabled": True, "loss_scale": 0}, "data_types": {"grad_accum_dtype": "bf16"},
            "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": 2, "offload_optimizer": CPU},
        },
        {"accumulate": "bf16", "cpu_adam": False, "stream_weights": False},
        {"precision": "16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_what_is_printed_is_taken_by_every_front_end(name, tmp_path, monkeypatch, capsys):
    given, options, trainer = FILES[name]
    (tmp_path / "ds_config.json").write_text(json.dumps({**given, "news": 1}))
    main([str(tmp_path / "ds_config.json")])
    text = capsys.readouterr().out
    printed = yaml.safe_load(text)["trainer"]
    strategy = printed.pop("strategy")
    assert (strategy["init_args"], printed) == (options, trainer)
    assert re.findall("UNKNOWN.*", text) == ["UNKNOWN to this command: news"]
    made = lightning_cxl.CXLOffloadStrategy(**strategy["init_args"])
    for variable in shlex.split(text.partition("any front end: ")[2].partition("\n# no")[0].replace("\n#", "")):
        if variable.startswith("LIGHTNING_CXL_"):
            monkeypatch.setenv(*variable.split("=", 1))
    assert OffloadConfig.resolve()[0] == made.config


@pytest.mark.parametrize("old", [{"cpu_offload_param": True}, {"offload_param": {"device": "auto"}}])
def test_weights_stream_where_deepspeed_offloads_them(old):
    assert convert({"zero_optimization": {"stage": 3, **old}}).strategy == {}
    assert convert({"zero_optimization": {"stage": 2, "cpu_offload": True}}).strategy == {"stream_weights": False}


def test_files_that_cannot_be_converted(tmp_path):
    for text, message in (
        ("{", "cannot read .*JSON file of DeepSpeed"),
        ('{"data_types": {"grad_accum_dtype": "fp16"}}', "accumulate must be one of"),
    ):
        (tmp_path / "ds_config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            main([str(tmp_path / "ds_config.json")])
