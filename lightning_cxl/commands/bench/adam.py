"""``python -m lightning_cxl bench adam``: the optimizer step and the gradient kernels against memory and others."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_cxl import _cpu
from lightning_cxl.commands.bench.adam_memory import memory_section
from lightning_cxl.commands.bench.adam_path import check_section, path_section
from lightning_cxl.commands.bench.adam_step import Curves, Options, state_section, step_section
from lightning_cxl.commands.bench.peers import set_threads
from lightning_cxl.commands.bench.plot import plot
from lightning_cxl.commands.bench.tensors import parse_count
from lightning_cxl.commands.measuring.pictures import check_matplotlib
from lightning_cxl.commands.measuring.results import Results, machine
from lightning_cxl.errors import ConfigError

_DESCRIPTION = """\
Time per parameter of CPUAdam and of the gradient check, against the roof (a loop that only moves the same bytes with
the same threads), and against torch, DeepSpeed, bitsandbytes and torchao where they are installed. Contenders take
turns in one process; tables show medians, the spread of all rounds, and the median of the rounds' ratios."""

_SECTIONS: dict[str, Callable[[Results, Options], Curves | None]] = {
    "step": step_section,
    "path": path_section,
    "states": state_section,
    "check": check_section,
    "memory": memory_section,
}


def main(arguments: Sequence[str]) -> None:
    """Measure what the arguments ask for; print tables, write JSON and a plot."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.threads < 1 or args.rounds < 1:
        parser.error("--threads and --rounds must be at least 1")
    if args.plot:
        if "step" not in args.sections:
            parser.error("--plot draws the section `step`: add it to --sections")
        check_matplotlib()
    for target in filter(None, (args.json, args.plot)):
        if not target.absolute().parent.is_dir():
            raise ConfigError(f"cannot write {target}: its folder does not exist")
    set_threads(args.threads)
    options = Options(args.threads, args.rounds, tuple(sorted(set(args.sizes))))
    results = Results(machine(args.threads))
    print("\n".join(f"{key}: {value}" for key, value in results.machine.items()))
    curves: Curves = {}
    for name in args.sections:
        start = time.perf_counter()
        curves = _SECTIONS[name](results, options) or curves
        print(f"\nsection {name}: {time.perf_counter() - start:.0f} s")
    print(f"\n{results.summary()}")
    if args.json:
        results.write(args.json)
    if args.plot:
        plot(curves, args.plot, f"{results.machine['cpu']}, {args.threads} threads")


def _count(text: str) -> int:
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error  # argparse does not show the text of a ValueError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lightning_cxl bench",
        description=_DESCRIPTION,
        epilog="example: python -m lightning_cxl bench adam --sections step --sizes 1M 20M",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=["adam"], help="what is measured")
    parser.add_argument(
        "--sections", nargs="+", choices=list(_SECTIONS), default=list(_SECTIONS), help="default: all of them"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=_count,
        default=[parse_count(text) for text in ("1M", "4M", "20M", "100M", "300M")],
        metavar="N",
        help="numbers of parameters, such as 500K or 20M (default: 1M 4M 20M 100M 300M)",
    )
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="turns of each contender (default: 15)")
    parser.add_argument(
        "--threads",
        type=int,
        default=_cpu.available_threads(),
        metavar="N",
        help="of all contenders (default: what this process may use)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time against size")
    return parser
