"""``python -m lightning_cxl convert FILE``: options of DeepSpeed as options of ours; every key has an answer."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import yaml

from lightning_cxl.commands import parsers
from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError
from lightning_cxl.text import wrapped


@dataclass
class Converted:
    """What a configuration becomes: options that are not our defaults, arguments of Lightning's Trainer, answers."""

    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    keys_of: dict[str, list[str]] = field(default_factory=dict)


Rule = str | Callable[[Converted, Any], str]
"""The answer to a key, or what reads its value (unless that is "auto") and returns the answer."""


def _set(kind: str, name: str, value: Any = None) -> Rule:
    def set_value(to: Converted, given: Any) -> str:
        if given is None or (value is not None and not given):
            return "off"
        getattr(to, kind)[name] = given if value is None else value
        return f"{name} of the {kind}"

    return set_value


_DEVICE = "host memory holds all optimizer state, and the weights unless stream_weights is false"
_PLANNED = "no option: buffers and transfers are planned"
_SIZES = "no option: blocks are copied and exchanged one by one, the next one while one computes"
_MODEL = "no option: FSDP2, the checkpoints or the model do not need it"
_LOGS = "see the loggers and profilers of your framework"
RULES: Sequence[tuple[str, Rule]] = (
    ("Z Z.stage", "no option: several devices shard all state, as stage 3 does; one device holds all"),
    ("Z.offload_*.nvme_path", "tiers of the strategy: what memory has no room for goes there; tier_rules move more"),
    ("Z.offload_*.device Z.cpu_offload* Z.offload_optimizer Z.offload_param", _DEVICE),
    ("Z.offload_*.pin_memory", 'pin_memory of the strategy: "auto" page-locks memory that a device copies from'),
    ("Z.offload_*.ratio", "state_on_device of the strategy: the device updates what units_on_device keeps there"),
    ("Z.offload_*.buffer_* Z.offload_*.max_in_cpu Z.offload_*.pipeline_* Z.offload_*.fast_init", _PLANNED),
    ("Z.offload_*.super_offload Z.offload_*.c*_cpu Z.offload_*.*_perc Z.zenflow aio", _PLANNED),
    ("Z.zero_hpz_partition_size Z.mics_*", "near to it: replicate_machines of the strategy"),
    ("Z.zero_quantized* Z.zeropp*", "no option: exchanges are not quantised"),
    ("Z.*gather_*_weights_on_model_save", "no option: saved models are whole"),
    ("Z.*_bucket_size Z.sub_group_size Z.overlap_comm Z.contiguous_gradients Z.reduce_scatter", _SIZES),
    ("Z.allgather_partitions Z.round_robin_gradients communication_data_type Z.stage3_*_threshold", _SIZES),
    ("Z.stage3_max_live_parameters Z.stage3_max_reuse_distance Z.stage3_*_for_fetch_params", _SIZES),
    ("Z.ignore_unused_parameters Z.memory_efficient_linear Z.load_from_fp32_weights Z.elastic_checkpoint", _MODEL),
    ("Z.leaf_module Z.legacy* zero_allow_untested_optimizer prescale_gradients sparse_gradients checkpoint", _MODEL),
    ("bf16.enabled bfloat16.enabled", _set("trainer", "precision", "bf16-true")),
    ("fp16.enabled", _set("trainer", "precision", "16-mixed")),
    ("fp16.* bf16.* bfloat16.* amp", "no option: the precision plug-in and loss scaler of your framework apply"),
    ("data_types.grad_accum_dtype", _set("strategy", "accumulate")),
    ("zero_force_ds_cpu_optimizer", _set("strategy", "cpu_adam")),
    ("gradient_accumulation_steps", _set("trainer", "accumulate_grad_batches")),
    ("gradient_clipping", _set("trainer", "gradient_clip_val")),
    ("train_micro_batch_size_per_gpu dataloader_drop_last", "set it in your data loader"),
    ("train_batch_size", "set batch and micro-batches in loader and Trainer"),
    ("optimizer scheduler", "make it in your program: Adam and AdamW of torch run as CPUAdam, others unchanged"),
    ("activation_checkpointing", "activation_offload, on by default: blocks are recomputed from their inputs"),
    ("steps_per_print *_breakdown dump_state flops_profiler comms_logger tensorboard wandb comet csv_monitor", _LOGS),
    ("autotuning elasticity compression_training data_efficiency hybrid_engine sparse_attention", "not supported"),
)


def _part(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = given.get(name)
    return part if isinstance(part, Mapping) else {}


def _visit(prefix: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Rule]]:
    for name, value in given.items():
        key = prefix + name
        short = key.replace("zero_optimization", "Z", 1)
        rule = next((rule for keys, rule in RULES for each in keys.split() if fnmatchcase(short, each)), None)
        if isinstance(value, Mapping) and value and (rule is None or short == "Z" or short.startswith("Z.offload")):
            yield from _visit(f"{key}.", value)
        else:
            yield key, value, rule or "UNKNOWN to this command"


def convert(given: Mapping[str, Any]) -> Converted:
    """Return what a configuration of DeepSpeed becomes; raises ConfigError for a value that our options do not take."""
    result = Converted()
    for key, value, rule in _visit("", given):
        if callable(rule):
            rule = '"auto": taken from the arguments of your Trainer' if value == "auto" else rule(result, value)
        result.keys_of.setdefault(rule, []).append(key)
    zero = _part(given, "zero_optimization")
    weights, state = _part(zero, "offload_param"), _part(zero, "offload_optimizer")
    nvme = [each.get("nvme_path") for each in (weights, state) if each.get("device") == "nvme"]
    paths = [path for index, path in enumerate(nvme) if path not in nvme[:index]]
    if not all(isinstance(path, str | None) for path in paths):
        raise ConfigError(f"nvme_path must be a folder, got {paths}")
    if paths:
        result.strategy["tiers"] = {"ssd": {"path": paths}}
    if weights.get("device", "none") == "none" and not zero.get("cpu_offload_param"):
        result.strategy["stream_weights"] = False  # several devices keep their shards on the host in any case
    default, config = OffloadConfig(), OffloadConfig(**result.strategy)
    result.strategy = {
        name: each for name, each in result.strategy.items() if getattr(config, name) != getattr(default, name)
    }
    return result


def main(arguments: list[str]) -> None:
    path = parsers.PARSERS["convert"]().parse_args(arguments).file
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}. Give the JSON file of DeepSpeed") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{path} must hold an object, as the JSON files of DeepSpeed do")
    result = convert(given)
    strategy = {"class_path": "lightning_cxl.CXLOffloadStrategy", "init_args": result.strategy}
    print(yaml.safe_dump({"trainer": {**result.trainer, "strategy": strategy}}, sort_keys=False))
    texts = {name: each if isinstance(each, str) else json.dumps(each) for name, each in result.strategy.items()}
    variables = [f"LIGHTNING_CXL_{name.upper()}={shlex.quote(text)}" for name, text in texts.items()]
    lines = [f"Accelerate, and the Trainer of transformers: offload={result.strategy}"]
    lines += [f"In the environment, with any front end: {' '.join(variables)}"] if variables else []
    lines += [f"{answer}: {', '.join(keys)}" for answer, keys in result.keys_of.items()]
    print("\n".join(f"# {line}" for each in lines for line in wrapped(each, 98)))
