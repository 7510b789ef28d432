"""What users write down: names, keys of YAML files, options of commands. A change breaks their files and programs."""

import importlib
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import lightning_cxl
from lightning_cxl.__main__ import main
from lightning_cxl.config import OffloadConfig
from lightning_cxl.finetune.data import TextData
from lightning_cxl.finetune.export import ExportPretrained
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.machine import speeds
from lightning_cxl.planning.policies import POLICIES

DUMPED = Path(__file__).parent / "fixtures" / "configs" / "dumped_earlier.yaml"

OF_FRAMEWORKS = [("accelerate", ["CXLAccelerator"]), ("transformers", ["CXLTrainer", "CXLTrainerMixin", "offload"])]
OPTIONS = {field.name: getattr(OffloadConfig(), field.name) for field in fields(OffloadConfig)}
"""The table of options in the README has names and defaults, too: see tests/test_examples.py."""
OF_STRATEGIES = {"accelerator": None, "checkpoint_io": None, "timeout": None, **OPTIONS}
ARGUMENTS = {
    lightning_cxl.CXLOffloadStrategy: {"precision_plugin": None, **OF_STRATEGIES},
    lightning_cxl.CXLFabricStrategy: {"precision": None, **OF_STRATEGIES},
    CausalLM: {
        "name_or_path": None, "vocab_size": 8192, "hidden_size": 512, "num_layers": 6, "num_heads": 8,
        "intermediate_size": 1408, "attn": "sdpa", "mapped": None, "lora": None, "quantization": None, "lr": None,
        "weight_decay": 0.1, "warmup_steps": 10,
    },
    TextData: {
        "text_files": None, "seq_len": 256, "batch_size": 6, "vocab_size": 8192, "val_fraction": 0.05, "seed": 0,
        "tokenizer_name_or_path": None, "train_on": "answers",
    },
    ExportPretrained: {"dirpath": None},
    lightning_cxl.OffloadProgressBar: {"plain_every_n_steps": 10, "kwargs": inspect.Parameter.empty},
}  # fmt: skip
KEYS_OF_FILES = {
    speeds.Machine: "name tiers device cache host_bytes write_contention source has_speeds ssd links",
    speeds.MachineSsd: "capacity_bytes read_bytes_per_s write_bytes_per_s num_drives versions",
    speeds.MachineTier: "name kind capacity_bytes num_nodes adam_bytes_per_s device_read_bytes_per_s "
    "device_write_bytes_per_s device_write_buffer_bytes latency_ns backed_by",
    speeds.Device: "name memory_bytes flops h2d_bytes_per_s d2h_bytes_per_s copy_latency_s count is_host",
    speeds.Cache: "nbytes bytes_per_s",
    speeds.Calibration: "date num_threads nodes devices cache_bytes cache_bytes_per_s ssds others_fraction",
    speeds.NodeSpeeds: "node_id read_bytes_per_s write_bytes_per_s adam_bytes_per_s latency_ns h2d_bytes_per_s "
    "d2h_bytes_per_s",
    speeds.DeviceSpeeds: "kind name flops h2d_bytes_per_s d2h_bytes_per_s copy_latency_s",
    speeds.SsdSpeeds: "folder read_bytes_per_s write_bytes_per_s direct",
}
COMMANDS = {
    "plan": "model tiers ssd ssd-budget ssd-checkpoint batch seq precision state master accumulate "
    "accumulate-grad-batches activation-offload stream-weights overlap policy loss lora quantize json",
    "calibrate": "output ssd quick",
    "export": "base adapter-config only-adapter dtype max-shard-bytes",
}


def test_names_and_policies():
    assert [name for name in lightning_cxl.__all__ if not hasattr(lightning_cxl, name)] == []
    for module, names in OF_FRAMEWORKS:
        assert importlib.import_module(f"lightning_cxl.{module}").__all__ == names
    assert set(POLICIES) == {"dram_only", "interleave", "latency_first", "bandwidth"}


@pytest.mark.parametrize("name", ["Placement", "PlacementPolicy", "PlacementRequest", "RoleHomePolicy"])
def test_removed_names_say_what_to_do(name):
    with pytest.raises(ImportError, match=r"was removed: policies are asked once .* `tier_rules` place single modules"):
        getattr(lightning_cxl, name)


@pytest.mark.parametrize("kind", ARGUMENTS, ids=lambda kind: kind.__name__)
def test_arguments_of_what_a_configuration_names(kind):
    found = inspect.signature(kind).parameters
    assert {name: parameter.default for name, parameter in found.items()} == ARGUMENTS[kind]


@pytest.mark.parametrize("kind", KEYS_OF_FILES, ids=lambda kind: kind.__name__)
def test_keys_of_machine_files_and_calibrations(kind):
    assert [field.name for field in fields(kind)] == KEYS_OF_FILES[kind].split()


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_commands(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning_cxl", command, "--help"])
    with pytest.raises(SystemExit):
        main()
    assert set(COMMANDS[command].split()) <= set(re.findall(r"--([a-z-]+)", capsys.readouterr().out))


def test_a_configuration_that_an_earlier_version_wrote_is_read(monkeypatch, capsys):
    """With the paths it names classes by; nothing of it is changed or left out."""
    monkeypatch.setattr(sys, "argv", ["lightning_cxl", "fit", "--config", str(DUMPED), "--print_config"])
    with pytest.raises(SystemExit):
        main()
    written, found = yaml.safe_load(DUMPED.read_text()), yaml.safe_load(capsys.readouterr().out)
    for bar in (each for each in found["trainer"]["callbacks"] if each["class_path"].endswith("ProgressBar")):
        bar["init_args"] = {"plain_every_n_steps": bar["init_args"]["plain_every_n_steps"]}  # the rest is Lightning's
    options, known = (each["trainer"]["strategy"]["init_args"] for each in (found, written))
    later = {**OPTIONS, "timeout": None}  # that version had none of them
    assert all(later[name] == value for name, value in options.items() if name not in known)
    found["trainer"]["strategy"]["init_args"] = {name: options[name] for name in known}
    assert written.keys() <= found.keys()
    for key, value in written.items():  # options that came later have their defaults
        assert value == ({name: found[key][name] for name in value} if isinstance(value, dict) else found[key])
