"""Options of all commands and the files they write, without an import of torch: `--help` is answered at once."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_cxl.errors import ConfigError

TO_STDOUT = Path("-")
"""Stands for stdout in the place of a file."""


def env() -> argparse.ArgumentParser:
    parser = _parser(
        "env",
        "Show this machine's memory, limits and devices as this package sees them, and what to change.",
        "",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    return parser


def calibrate() -> argparse.ArgumentParser:
    parser = _parser(
        "calibrate",
        """\
Measures how fast this machine's memory is (every node read, written, updated as Adam does it, and followed load by
load), its caches, its devices (copies from and to every node, bf16 matrix products), and disks. The results are kept
for this machine and used by plans; `python -m lightning_cxl env` shows it. Nothing else should run meanwhile.""",
        " --quick --output machine.yaml",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write this machine as YAML, to edit and reuse"
    )
    parser.add_argument(
        "--ssd", type=Path, metavar="DIR", action="append", default=[], help="a folder on a drive for the tier ssd"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of a minute, and less exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured as JSON")
    return parser


def export() -> argparse.ArgumentParser:
    parser = _parser(
        "export",
        """\
Writes a checkpoint as a folder that transformers, and tools that read its folders (llama.cpp), load: config, tokenizer,
and weights as safetensors. The checkpoint is a file of Lightning or Fabric, or a folder: of Lightning with several
processes, of Accelerate (save_state), of the Hugging Face Trainer or of peft. Adapters are merged into the base model;
quantised weights become plain numbers.""",
        " last.ckpt folder --dtype bfloat16",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a file or folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="is created")
    parser.add_argument(
        "--base", type=Path, metavar="FOLDER", help="the model that was trained, for what the checkpoint does not hold"
    )
    parser.add_argument(
        "--adapter-config", type=Path, metavar="FILE", help="peft's adapter_config.json, for adapters in a state dict"
    )
    parser.add_argument("--only-adapter", action="store_true", help="write the adapter alone, for peft")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights; float32 and float16 are made from "
        "float32 master weights where CKPT has them; default: the weights that the model computes with",
    )
    parser.add_argument("--max-shard-bytes", default="5GiB", metavar="BYTES", help="of one file (default: 5GiB)")
    return parser


def plan() -> argparse.ArgumentParser:
    """Return the parser of `plan`; its defaults are those of `commands.planned_model.Settings`."""
    parser = _parser(
        "plan",
        """\
Say before a run what it would keep where, whether that fits, and how long a step would take. No
weights are loaded; seconds are predicted, not measured. Exit status: 0 if the job fits, 3 if it does not, 1 after
an error, 2 for options that are none.""",
        " --model llama-3.1-8b --tiers examples/machines/one_card.yaml",
    )
    add: Any = parser.add_argument
    add("--model", required=True, help="folder with a config.json, hub id, or a shape such as llama-3.1-8b")
    add("--seq", dest="sequence", metavar="SEQ", type=int, default=4096, help="tokens per sequence (%(default)s)")
    add("--batch", type=int, default=1, help="sequences per micro-batch (%(default)s)")
    add("--tiers", type=Path, help="machine as YAML; this machine with what is free on it when left out")
    add("--ssd", metavar="DIR", action="append", help="folder for what memory cannot hold, one for each drive")
    add("--ssd-budget", metavar="SIZE", help="most bytes there, such as 500GiB (what is free)")
    add("--ssd-checkpoint", choices=["copy", "reference"], help="reference: twice the bytes there (copy)")
    add(
        "--policy",
        default="auto",
        help="auto: what a run takes; by_role, dram_only, interleave, latency_first, bandwidth, or "
        "package.module.Class (%(default)s)",
    )
    add("--precision", choices=["32-true", "bf16-true", "bf16-mixed"], default="bf16-true", help="(%(default)s)")
    add("--state", choices=["fp32", "bf16", "8bit"], default="fp32", help="momentum, variance (%(default)s)")
    add("--master", choices=["split", "fp32"], default="split", help="master weights (%(default)s)")
    add("--accumulate", choices=["fp32", "bf16"], default="fp32", help="sums of gradients (%(default)s)")
    add("--accumulate-grad-batches", type=int, default=1, help="micro-batches per step (%(default)s)")
    add(
        "--overlap",
        choices=["auto", "none", "backward", "forward"],
        default="auto",
        help='what the update runs behind; backward needs on_overflow="ignore" (%(default)s)',
    )
    switch = argparse.BooleanOptionalAction
    add("--activation-offload", action=switch, default=True, help="inputs of units to the host (on)")
    add("--stream-weights", action=switch, default="auto", help="weights of units to the host (on with a GPU)")
    add(
        "--loss",
        choices=["full", "chunked"],
        default="full",
        help="chunked: under lightning_cxl.chunked_loss, as the main job computes it (%(default)s)",
    )
    add("--devices", type=int, metavar="N", help="of each machine, a rank for each (all that the machine has)")
    add("--num-nodes", type=int, default=1, metavar="M", help="machines like this one (%(default)s)")
    add(
        "--between-nodes",
        choices=["replicate", "shard"],
        default="shard",
        help="machines each hold the whole model (HSDP), or it is cut over all ranks (%(default)s)",
    )
    add("--no-sync", action="store_true", help="several devices: only the last micro-batch reduces gradients")
    add("--lora", type=int, metavar="R", help="train adapters of this rank on all linear layers, not the weights")
    add("--quantize", choices=["4bit", "8bit"], help="weights below adapters (needs --lora)")
    add("--json", type=Path, metavar="FILE", help="write everything there; -: to stdout, and the text to stderr")
    add("--plot", help=argparse.SUPPRESS)  # removed: an error says what to do instead
    add("--weights", choices=["auto", "gathered", "shared"], help=argparse.SUPPRESS)  # the last one was removed
    return parser


def training(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command that trains or uses a model: its most used options, for `--help` alone.

    Lightning's command line has them all, and takes seconds to import.
    """
    parser = _parser(
        name,
        """\
Trains and uses a causal language model of transformers on text or conversations. These are the options that most runs
need; `--help all` shows every option, and `--print_config` a file with all of them.""",
        " --config examples/configs/finetune_stdlib.yaml" + ("" if name == "fit" else " --ckpt_path last.ckpt"),
    )
    for option, text in (
        ("--config FILE", "options as YAML, such as those in examples/configs; options behind it win"),
        ("--model.name_or_path NAME", "the model: a hub id or a folder"),
        ("--data.text_files FILES", "text or conversations (JSONL), with patterns; default: Python's own source code"),
        ("--data.seq_len N", "tokens of a row"),
        ("--data.batch_size N", "rows of a micro-batch"),
        ("--model.lr RATE", "highest learning rate"),
        ("--model.lora FIELDS", "train adapters alone: fields of peft's LoraConfig, such as '{r: 16}'"),
        ("--model.quantization KIND", "4bit or 8bit: quantise the weights below adapters (QLoRA)"),
        ("--trainer.strategy NAME", "cxl_offload (default), or any other of Lightning; options of ours: in YAML"),
        ("--trainer.precision NAME", "bf16-true, 32-true, ..."),
        ("--trainer.max_epochs N", "over the data"),
        ("--trainer.max_steps N", "of the optimizer"),
        ("--ckpt_path FILE", "a checkpoint: to resume from (fit), or to use"),
    ):
        flag, _, metavar = option.partition(" ")
        parser.add_argument(flag, metavar=metavar, help=text)
    return parser


PARSERS: Mapping[str, Callable[[], argparse.ArgumentParser]] = {
    "env": env,
    "calibrate": calibrate,
    "export": export,
    "plan": plan,
}
"""Of commands that parse their own options."""


def check_target(path: Path | None) -> None:
    """Check before anything is measured that a file can be written; None is no file, and so is `TO_STDOUT`."""
    if path is None or path == TO_STDOUT:
        return
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: its folder does not exist")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder. Name a file in it")


def write_text(path: Path, text: str) -> None:
    """Write a file, or to stdout."""
    if path == TO_STDOUT:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Name a file that can be written") from error


def _parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    program = f"python -m lightning_cxl {name}"
    return argparse.ArgumentParser(
        program,
        description=description,
        epilog=f"example: {program}{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
