"""All commands in one table, which is also what ``python -m lightning_cxl --help`` shows, without importing torch."""

import difflib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_cxl.commands import parsers
from lightning_cxl.text import table_lines

PROGRAM = "python -m lightning_cxl"
VERSION = "0.1.0"


class Command(NamedTuple):
    """One command."""

    does: str
    module: str
    """Imported when the command runs; its ``main(arguments)`` runs it and may return an exit status."""
    trains: bool = False
    """Runs the user's own modules: their errors keep their traceback."""


COMMANDS: Mapping[str, Command] = {
    "fit": Command("train a causal language model on text or conversations", "lightning_cxl.finetune.cli", trains=True),
    "validate": Command("its loss on held-out text", "lightning_cxl.finetune.cli", trains=True),
    "test": Command("the same, logged as test_loss", "lightning_cxl.finetune.cli", trains=True),
    "predict": Command("its most likely next tokens of held-out text", "lightning_cxl.finetune.cli", trains=True),
    "export": Command(
        "a checkpoint as a folder for transformers; adapters merged, quantised weights plain",
        "lightning_cxl.commands.export",
    ),
    "plan": Command(
        "what a job holds where, whether it fits, seconds per step; loads no weights",
        "lightning_cxl.commands.plan",
    ),
    "env": Command("what this machine has, and what to change about it", "lightning_cxl.commands.env"),
    "calibrate": Command("measure memory, devices and disks, for `plan`", "lightning_cxl.commands.calibrate"),
}


def overview() -> str:
    """Return the table of all commands, and where to read on."""
    rows = [(name, command.does) for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [OPTIONS]",
            "",
            "Fine-tune large language models from host memory: DRAM and CXL memory.",
            "",
            *table_lines(("command", "what it does"), rows, left=2, indent=2),
            "",
            f"{PROGRAM} COMMAND --help shows the options of a command and an example.",
        ]
    )


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
    if name in parsers.PARSERS:
        parsers.PARSERS[name]().parse_args(options)
    elif name in COMMANDS and options in (["-h"], ["--help"]):
        parsers.training(name).parse_args(options)


def answer_before_imports() -> None:
    """Answer at once what needs no torch, if this process is the command line; called while the package is imported.

    Python imports the package before ``lightning_cxl.__main__``, and torch and Lightning with it: seconds that a look
    at the commands need not wait for, and that all others hear of on stderr. While they are imported, Ctrl-C ends the
    process without a traceback; ``__main__`` takes over afterwards.
    """
    if not _is_command_line():
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


def _is_command_line() -> bool:
    # argv[0] is "-m" only until Python has found the module; then the name of the module is at the same place of
    # orig_argv, which tells our command from `python -m other_package` that imports this one
    by_module = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "lightning_cxl"
    return by_module or Path(sys.argv[0]).name == "lightning-cxl"


def _usage_error(message: str) -> int:
    print(f"{overview()}\n\nerror: {message}", file=sys.stderr)
    return 2
