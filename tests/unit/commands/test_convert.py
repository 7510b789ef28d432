"""Configurations as the documents of DeepSpeed and transformers show them; what is printed is used as it is."""

import ast
import json
import re
import shlex

import pytest
import yaml

import lightning_cxl
from lightning_cxl.commands.convert import convert, main
from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError

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
    "transformers, stage 2": (
        {"fp16": FP16, "bf16": {"enabled": "auto"}, "zero_optimization": STAGE_2, **AUTO},
        {"stream_weights": False}, {},
    ),
    "transformers, stage 3": (
        {
            **BF16, "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU}, **AUTO,
            "steps_per_print": 2000, "wall_clock_breakdown": False,
        },
        {}, {"precision": "bf16-true"},
    ),
    "transformers, drives": (
        {
            **BF16, "aio": AIO, **AUTO,
            "zero_optimization": {**STAGE_3, "offload_optimizer": SWAPPED_STATE, "offload_param": SWAPPED_WEIGHTS},
        },
        {"tiers": {"ssd": {"path": ["/local_nvme"]}}}, {"precision": "bf16-true"},
    ),
    "DeepSpeed, stage 2": (
        {
            "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0, "fp16": {**FP16, "enabled": True}, "data_types": {"grad_accum_dtype": "bf16"},
            "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": 2, "cpu_offload": True},
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
def test_weights_stream_where_deepspeed_offloads_them(old):
    assert convert({"zero_optimization": {"stage": 3, **old}}).strategy == {}
    assert convert({"zero_optimization": True}).strategy == {"stream_weights": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read .*JSON file of DeepSpeed"),
        ("[]", "must hold an object"),
        ('{"data_types": {"grad_accum_dtype": "fp16"}}', "accumulate must be one of"),
        ('{"zero_optimization": {"offload_param": {"device": "nvme"}}}', "path of .ssd. must be a folder"),
    ],
)
def test_files_that_cannot_be_converted(text, message, tmp_path):
    (tmp_path / "ds_config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        main([str(tmp_path / "ds_config.json")])
    with pytest.raises(ConfigError, match="cannot read"):
        main([str(tmp_path / "none.json")])
