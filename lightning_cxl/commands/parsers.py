"""Options of all commands and the files they write, without an import of torch: `--help` is answered at once."""

import argparse
import difflib
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cxl.errors import ConfigError
from lightning_cxl.text import table_lines

TO_STDOUT = Path("-")  # stands for stdout in the place of a file


def env() -> argparse.ArgumentParser:
    parser = _parser(
        "env", "Show this machine's memory, limits and devices as this package sees them, and what to change.", ""
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument("--last", action="store_true", help="say instead what the training held that was killed last")
    return parser


def calibrate() -> argparse.ArgumentParser:
    parser = _parser(
        "calibrate",
        """\
Measures how fast this machine's memory is (every node read, written, and updated as Adam does it), its caches, its
devices (copies from and to every node, a Llama block in bf16), and disks. The results are kept for this machine and
used by plans; `python -m lightning_cxl env` shows them. Nothing else should run meanwhile.""",
        " --quick --output machine.yaml",
    )
    add: Any = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="also write this machine as YAML, to edit and reuse")
    add("--ssd", type=Path, metavar="DIR", action="append", default=[], help="a folder on a drive for the tier ssd")
    add("--quick", action="store_true", help="seconds instead of a minute, and less exact")
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
    add: Any = parser.add_argument
    add("checkpoint", type=Path, metavar="CKPT", help="a file or folder")
    add("folder", type=Path, metavar="FOLDER", help="is created")
    add("--base", type=Path, metavar="FOLDER", help="the trained model, for what the checkpoint does not hold")
    add("--adapter-config", type=Path, metavar="FILE", help="peft's adapter_config.json, for adapters in a state dict")
    add("--only-adapter", action="store_true", help="write the adapter alone, for peft")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights; float32 and float16 are made from "
        "float32 master weights where CKPT has them; default: the weights that the model computes with",
    )
    add("--max-shard-bytes", default="5GiB", metavar="BYTES", help="of one file (default: 5GiB)")
    return parser


def convert() -> argparse.ArgumentParser:
    parser = _parser(
        "convert",
        """\
Prints the options that take the place of a configuration of DeepSpeed: YAML for Lightning, and in comments what the
other front ends and the environment take, and what became of every key.""",
        " ds_config.json > run.yaml",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a JSON file of DeepSpeed")
    return parser


_ON_OR_OFF = argparse.BooleanOptionalAction


def _option(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _choice(choices: tuple[str, ...], default: str | None, text: str) -> Any:
    return _option(default, text, choices=choices)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The job that `plan` plans; options that the strategy has, too, have the same names there."""

    batch: int = _option(1, "sequences per micro-batch (%(default)s)", type=int)
    sequence: int = _option(4096, "tokens per sequence (%(default)s)", type=int, flag="--seq", metavar="SEQ")
    precision: str = _choice(("32-true", "bf16-true", "bf16-mixed"), "bf16-true", "(%(default)s)")
    state: str = _choice(("fp32", "bf16", "8bit"), "fp32", "momentum, variance (%(default)s)")
    master: str = _choice(("split", "fp32"), "split", "master weights (%(default)s)")
    accumulate: str = _choice(("fp32", "bf16"), "fp32", "sums of gradients (%(default)s)")
    accumulate_grad_batches: int = _option(1, "micro-batches per step (%(default)s)", type=int)
    overlap: str = _choice(
        ("auto", "none", "backward", "forward"),
        "auto",
        'what the update runs behind; backward needs on_overflow="ignore" or, on one device, "error" (%(default)s)',
    )
    activation_offload: bool = _option(True, "inputs of units to the host (on)", action=_ON_OR_OFF)
    stream_weights: bool | str = _option("auto", "weights of units to the host (on with a GPU)", action=_ON_OR_OFF)
    units_on_device: int | str = _option(
        0,
        "units whose weights stay on the device; auto: as many as have room (%(default)s)",
        type=_count_or_auto,
        metavar="K",
    )
    state_on_device: bool = _option(
        False, "optimizer state of what stays on the device there, too (off)", action=_ON_OR_OFF
    )
    loss: str = _choice(
        ("full", "chunked"),
        "full",
        "chunked: under lightning_cxl.chunked_loss, as the main job computes it (%(default)s)",
    )
    lora: int | None = _option(
        None, "train adapters of this rank on all linear layers, not the weights", type=int, metavar="R"
    )
    quantize: str | None = _choice(("4bit", "8bit"), None, "weights below adapters (needs --lora)")
    num_nodes: int = _option(1, "machines like this one (%(default)s)", type=int, metavar="M")
    between_nodes: str = _choice(
        ("replicate", "shard"),
        "shard",
        "machines each hold the whole model (HSDP), or it is cut over all ranks (%(default)s)",
    )
    no_sync: bool = _option(False, "several devices: only the last micro-batch reduces gradients", action="store_true")


def plan() -> argparse.ArgumentParser:
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
    for each in fields(PlanOptions):
        more = dict(each.metadata)
        add(more.pop("flag", "--" + each.name.replace("_", "-")), dest=each.name, default=each.default, **more)
    add("--devices", type=int, metavar="N", help="of each machine, a rank for each (all that the machine has)")
    add("--json", type=Path, metavar="FILE", help="write everything there; -: to stdout, and the text to stderr")
    return parser


SCRIPT = (
    "The file of --script defines model(), which returns a new model (few blocks, same code), and batch(number), which "
    "returns what micro-batch `number` trains on. It may define loss(model, batch), which returns the loss; without it "
    "the loss is what training_step(batch, number) of a LightningModule returns, else model(*batch), or model(**batch) "
    "for a dict: the loss itself, or an object or dict that has `loss`. Seeds are the same in each run"
)
OF_MODEL: Mapping[str, int | None] = {"blocks": 4, "batch": 2, "seq": 32, "lora": None}
"""Options of `verify` that only a model of transformers has, and their defaults."""


def verify() -> argparse.ArgumentParser:
    parser = _parser(
        "verify",
        f"""\
Trains a small copy of a model that has random weights, with and without offload, and compares every output, gradient
and weight bit by bit; the first module that differs is named. Asks the kernel where pages are, and measures the update.
Exit status: 0 if all is equal, 1 if not.

{textwrap.fill(SCRIPT + ". The optimizer is AdamW.", 118)}""",
        " --model folder --precision bf16-true --lora 8",
    )
    add: Any = parser.add_argument
    which: Any = parser.add_mutually_exclusive_group().add_argument
    which("--model", default="llama-3.2-1b", help="folder with a config.json, hub id, or a shape (%(default)s)")
    which("--script", type=Path, metavar="FILE", help="Python that makes any other model, as above")
    add("--precision", choices=("32-true", "bf16-true", "bf16-mixed"), help="(bf16-true; of --script: its own)")
    add("--units", nargs="+", default="auto", metavar="NAME", help="patterns or classes of blocks (%(default)s)")
    add("--blocks", type=int, metavar="N", help=f"of --model, at most ({OF_MODEL['blocks']})")
    add("--batch", type=int, help=f"of --model: sequences per micro-batch ({OF_MODEL['batch']})")
    add("--seq", type=int, help=f"of --model: tokens per sequence ({OF_MODEL['seq']})")
    add("--accumulate-grad-batches", type=int, default=2, metavar="N", help="micro-batches per step (%(default)s)")
    add("--clip", type=float, default=1.0, metavar="NORM", help="of gradients; 0: none (%(default)s)")
    add("--lora", type=int, metavar="R", help="of --model: train adapters of this rank on all linear layers")
    add("--json", type=Path, metavar="FILE", help="write the verdicts there; -: to stdout")
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
    each.__name__: each for each in (env, calibrate, export, convert, plan, verify)
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


PROGRAM = "python -m lightning_cxl"
VERSION = "0.1.0"


class Command(NamedTuple):
    does: str
    module: str  # of this package, imported when the command runs: its `main(arguments)` may return an exit status
    trains: bool = False  # runs the user's own modules: their errors keep their traceback


COMMANDS: Mapping[str, Command] = {
    "fit": Command("train a causal language model on text or conversations", "finetune.cli", trains=True),
    "validate": Command("its loss on held-out text", "finetune.cli", trains=True),
    "test": Command("the same, logged as test_loss", "finetune.cli", trains=True),
    "predict": Command("its most likely next tokens of held-out text", "finetune.cli", trains=True),
    "export": Command(
        "a checkpoint as a folder for transformers; adapters merged, quantised weights plain", "commands.export"
    ),
    "convert": Command("a configuration of DeepSpeed as options of this package", "commands.convert"),
    "plan": Command("what a job holds where, whether it fits, seconds per step; loads no weights", "commands.plan"),
    "verify": Command(
        "train a small copy of a model with and without offload, and compare all bits", "commands.verify", trains=True
    ),
    "env": Command("what this machine has, and what to change about it", "commands.env"),
    "calibrate": Command("measure memory, devices and disks, for `plan`", "commands.calibrate"),
}


def overview() -> str:
    rows = [(name, command.does) for name, command in COMMANDS.items()]
    table = "\n".join(table_lines(("command", "what it does"), rows, left=2, indent=2))
    return f"""\
usage: {PROGRAM} COMMAND [OPTIONS]

Fine-tune large language models from host memory: DRAM and CXL memory.

{table}

{PROGRAM} COMMAND --help shows the options of a command and an example."""


def answer_at_once(arguments: Sequence[str]) -> None:
    """End the process where `arguments` ask for help or the version, or cannot be run as they are; else return.

    An option as the first argument, such as ``--config``, belongs to the main job's commands.
    """
    if not arguments:
        sys.exit(_usage_error("no command was given"))
    name, *options = arguments
    if name == "help":  # `help plan` is `plan --help`
        name, *options = [*options, "--help"][:2]
    if name in ("-h", "--help"):
        print(overview())
        sys.exit(0)
    if name in ("-V", "--version"):
        print(f"lightning_cxl {VERSION}")
        sys.exit(0)
    if name == "bench":
        sys.exit("`bench` is no command any more: its benchmarks are adam.py, ssd.py and pools.py in examples/bench")
    if name not in COMMANDS and not name.startswith("-"):
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        sys.exit(_usage_error(f"no command {name!r}" + (f": did you mean `{near[0]}`?" if near else "")))
    if name in PARSERS:
        PARSERS[name]().parse_args(options)
    elif name in COMMANDS and options in (["-h"], ["--help"]):
        training(name).parse_args(options)


def answer_before_imports() -> None:
    """Answer at once what needs no torch, if this process is the command line; called while the package is imported.

    Python imports the package before ``lightning_cxl.__main__``, and torch and Lightning with it: seconds that a look
    at the commands need not wait for, and that all others hear of on stderr. While they are imported, Ctrl-C ends the
    process without a traceback; ``__main__`` takes over afterwards.
    """
    # argv[0] is "-m" only until Python has found the module; then the name of the module is at the same place of
    # orig_argv, which tells our command from `python -m other_package` that imports this one
    by_module = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "lightning_cxl"
    if not by_module and Path(sys.argv[0]).name != "lightning-cxl":
        return
    answer_at_once(sys.argv[1:])
    try:
        import lightning_cxl.native  # noqa: F401
    except ImportError as error:
        sys.exit(f"{PROGRAM}: {error}")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{PROGRAM} {sys.argv[1]}: importing torch and Lightning ...", file=sys.stderr, flush=True)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _usage_error(message: str) -> int:
    print(f"{overview()}\n\nerror: {message}", file=sys.stderr)
    return 2
