import ast
import errno
import importlib
import json
import os
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
from lightning_cxl.planning.policies import POLICIES

NAMES = ["fit", "validate", "test", "predict", "export", "convert", "plan", "verify", "env", "calibrate"]


def run(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, text=True, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})


def test_every_command_is_in_the_table_and_can_be_imported():
    assert list(COMMANDS) == NAMES
    for command in COMMANDS.values():
        assert callable(importlib.import_module(f"lightning_cxl.{command.module}").main)
        assert command.trains == (command.module in ("finetune.cli", "commands.verify"))


ANSWERED_AT_ONCE = [
    (["--help"], 0, "calibrate"),
    (["--version"], 0, f"lightning_cxl {lightning_cxl.__version__}"),
    (["help", "plan"], 0, "usage: python -m lightning_cxl plan "),
    *((["help", "plan"], 0, policy) for policy in POLICIES),
    *(([name, "--help"], 0, f"example: python -m lightning_cxl {name}") for name in NAMES),
    (["plan", "--sqe", "3"], 2, "required: --model"),
    (["fitt"], 2, "did you mean `fit`?"),
]


def test_help_and_wrong_options_import_no_torch():
    """Each is a first import of the package, in one process."""
    code = (
        "import sys, ast\n"
        "for arguments in ast.literal_eval(sys.argv[1]):\n"
        "    sys.argv, sys.orig_argv = ['-m', *arguments], ['python', '-m', 'lightning_cxl', *arguments]\n"
        "    for name in [name for name in sys.modules if name.startswith('lightning_cxl')]: del sys.modules[name]\n"
        "    try:\n"
        "        import lightning_cxl\n"
        "    except SystemExit as stopped:\n"
        "        print(f'status {stopped.code}', flush=True)\n"
        "print(*sys.modules)\n"
    )
    shown = run("-c", code, str([arguments for arguments, _, _ in ANSWERED_AT_ONCE]), stderr=subprocess.STDOUT)
    answers = re.split(r"^status (\d)\n", shown.stdout, flags=re.MULTILINE)
    for (arguments, status, text), answer, found in zip(ANSWERED_AT_ONCE, answers[::2], answers[1::2], strict=False):
        assert int(found) == status and text in answer, arguments
    assert len(answers) == 2 * len(ANSWERED_AT_ONCE) + 1
    imported = set(answers[-1].split())
    assert "lightning_cxl.commands.parsers" in imported
    assert not imported & {"torch", "lightning", "numpy", "transformers"}


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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_no_traceback():
    with open("/dev/full", "w") as full:
        done = run("-m", "lightning_cxl", "env", stdout=full)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("`python -m lightning_cxl env` cannot ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


FIXTURES = Path(__file__).parents[2] / "fixtures" / "sysfs"


def test_report_and_text_of_a_machine_with_two_cards():
    report = environment_report(FIXTURES / "3node")
    tiers = [(tier["name"], tier["node_ids"], tier["emulated"]) for tier in report["tiers"]]
    assert tiers == [("dram", [0], False), ("cxl", [1, 2], False)]
    card = report["nodes"][1]
    assert (card["zone"], card["allowed"], card["has_cpus"], card["distance"]) == ("normal", True, False, 24)
    assert json.loads(json.dumps(report)) == report
    text = format_environment({**report, "limits": {**report["limits"], "memlock_bytes": 8 << 20}})
    for shown in ("cxl: 2.0 GiB on nodes 1, 2 (57.3 GB/s read, 250 ns)", "distance 24, read 28.7", "memlock: 8.0 MiB"):
        assert shown in text


def test_advice_where_something_is_to_be_changed_only():
    healthy = environment_report(FIXTURES / "3node")
    healthy["limits"]["memlock_bytes"], healthy["kernel"]["numa_balancing"] = None, "0"
    assert advice(healthy) == []
    assert format_environment({**healthy, "advice": []}).endswith("advice\n  nothing to change")
    for section, values, message in (
        ("limits", {"memlock_bytes": 65536}, "limited to 64.0 KiB.*ulimit -l unlimited"),
        ("kernel", {"transparent_hugepage": "never"}, "echo madvise"),
        ("kernel", {"numa_balancing": "2"}, "kernel.numa_balancing=0"),
        ("cpu", {"isa": None, "isa_error": "LIGHTNING_CXL_ISA='avx9'"}, "cannot be used: LIGHTNING_CXL_ISA='avx9'"),
    ):
        (text,) = advice({**healthy, section: {**healthy[section], **values}})
        assert re.search(message, text)


AUTO = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr"), "auto")},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
}  # fmt: skip
FP16 = {
    "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
    "min_loss_scale": 1,
}  # fmt: skip
CPU = {"device": "cpu", "pin_memory": True}
STAGE_2 = {
    "stage": 2, "offload_optimizer": CPU, "allgather_partitions": True, "allgather_bucket_size": 2e8,
    "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True,
}  # fmt: skip
STAGE_3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True}
SWAPPED_STATE = {**NVME, "buffer_count": 4, "pipeline_read": True, "fast_init": False}
SWAPPED_WEIGHTS = {**NVME, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}
AIO = {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}
BF16 = {"bf16": {"enabled": True}}
# what is given, options of the strategy, arguments of the Trainer
FILES = {
    "transformers, stage 3 on drives": (
        {
            **BF16, "aio": AIO, **AUTO, "steps_per_print": 2000, "wall_clock_breakdown": False,
            "zero_optimization": {**STAGE_3, "offload_optimizer": SWAPPED_STATE, "offload_param": SWAPPED_WEIGHTS},
        },
        {"tiers": {"ssd": {"path": ["/local_nvme"]}}}, {"precision": "bf16-true"},
    ),
    "DeepSpeed, stage 2": (
        {
            "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0, "fp16": {**FP16, "enabled": True}, "data_types": {"grad_accum_dtype": "bf16"},
            "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": "auto"}, "scheduler": AUTO["scheduler"],
            "zero_optimization": STAGE_2,
            "optimizer": {"type": "Adam", "params": {"lr": 1.5e-4, "betas": [0.9, 0.95]}},
            "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
            "tensorboard": {"enabled": True, "output_path": "logs/"},
        },
        {"accumulate": "bf16", "cpu_adam": False, "stream_weights": False},
        {"precision": "16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
    ),
}  # fmt: skip


def shown(given, tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(given))
    main([str(path)])
    return capsys.readouterr().out


def keys_of(given, prefix=""):
    for name, value in given.items():
        yield prefix + name
        if isinstance(value, dict) and name in ("zero_optimization", "fp16", "bf16", "offload_param"):
            yield from keys_of(value, f"{prefix}{name}.")


@pytest.mark.parametrize("name", FILES)
def test_what_is_printed_is_taken_by_every_front_end(name, tmp_path, monkeypatch, capsys):
    given, options, trainer = FILES[name]
    text = shown(given, tmp_path, capsys)
    printed = yaml.safe_load(text)["trainer"]
    strategy = printed.pop("strategy")
    assert (strategy["init_args"], printed) == (options, trainer)
    made = lightning_cxl.CXLOffloadStrategy(**strategy["init_args"])
    lines = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert "UNKNOWN" not in text
    assert {key for key in keys_of(given) if key not in lines} == set()
    (offload,) = re.findall(r"offload=(\{.*?\}) (?:In the environment|\S+ \S+)", lines)
    assert ast.literal_eval(offload) == options
    for variable in shlex.split(text.partition("any front end: ")[2].partition("\n# no")[0].replace("\n#", "")):
        if variable.startswith("LIGHTNING_CXL_"):
            monkeypatch.setenv(*variable.split("=", 1))
    assert OffloadConfig.resolve()[0] == made.config


@pytest.mark.parametrize("old", [{"cpu_offload_param": True}, {"offload_param": {"device": "auto"}}])
def test_weights_stream_where_deepspeed_offloads_them_and_what_is_auto_is_the_trainers(old):
    asked = convert({"zero_optimization": {"stage": 3, **old}, "fp16": FP16, **AUTO})
    assert (asked.strategy, asked.trainer) == ({}, {})
    assert convert({"zero_optimization": {"stage": 2, "cpu_offload": True}}).strategy == {"stream_weights": False}
    assert convert({"zero_optimization": True}).strategy == {"stream_weights": False}


def test_files_that_cannot_be_converted(tmp_path):
    for text, message in (
        ("{", "cannot read .*JSON file of DeepSpeed"),
        ('{"data_types": {"grad_accum_dtype": "fp16"}}', "accumulate must be one of"),
        ('{"zero_optimization": {"offload_param": {"device": "nvme"}}}', "path of .ssd. must be a folder"),
    ):
        (tmp_path / "ds_config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            main([str(tmp_path / "ds_config.json")])
