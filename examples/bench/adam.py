"""The optimizer step and the gradient kernels: time per parameter against memory, torch, DeepSpeed and others.

    python examples/bench/adam.py [--sections step path ...] [--sizes 1M 100M ...] [--json FILE] [--plot FILE.png]

Against the roof (a loop that only moves the same bytes with the same threads), torch's fused AdamW, and the optimizers
of others where they are installed (torch foreach and compiled, DeepSpeed, bitsandbytes, torchao): the step, the whole
way from bf16 gradients to new bf16 weights, many small tensors, extra memory, and a goal for each of CPUAdam's numbers.
Contenders take turns in one process; tables show medians, the spread of all rounds, and the median of the rounds'
ratios.
"""

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from adam_bench.contenders import Options
from adam_bench.memory import memory_section
from adam_bench.path import check_section, path_section
from adam_bench.plot import plot
from adam_bench.problems import parse_count
from adam_bench.step import Curves, state_section, step_section
from results import Results, check_matplotlib, machine

from lightning_cxl.commands.parsers import check_target
from lightning_cxl.native import _cpu

_SECTIONS: dict[str, Callable[[Results, Options], Curves | None]] = {
    "step": step_section,
    "path": path_section,
    "states": state_section,
    "check": check_section,
    "memory": memory_section,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    parser.add_argument(
        "--sections", nargs="+", choices=list(_SECTIONS), default=list(_SECTIONS), help="default: all of them"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time against size")
    args = parser.parse_args(arguments)
    if args.plot:
        if "step" not in args.sections:
            parser.error("--plot draws the section `step`: add it to --sections")
        check_matplotlib()
        check_target(args.plot)
    options, results = begin(parser, args)
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


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of sizes, rounds, threads and the file of numbers."""
    parser = argparse.ArgumentParser(
        "python examples/bench/adam.py",
        description=__doc__,
        epilog="example: python examples/bench/adam.py --sections step",
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    return parser


def begin(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[Options, Results]:
    """Check the options that `make_parser` made, set the threads, and print what the machine is.

    Raises:
        ConfigError: the file of numbers cannot be written.
    """
    if args.threads < 1 or args.rounds < 1:
        parser.error("--threads and --rounds must be at least 1")
    check_target(args.json)
    set_threads(args.threads)
    results = Results(machine(args.threads))
    print("\n".join(f"{key}: {value}" for key, value in results.machine.items()))
    return Options(args.threads, args.rounds, tuple(sorted(set(args.sizes)))), results


def set_threads(num_threads: int) -> None:
    """Let torch and everything else that uses OpenMP compute with so many threads."""
    torch.set_num_threads(num_threads)
    # torch brings an OpenMP of its own: extensions that others compile use the system's
    ctypes.CDLL("libgomp.so.1").omp_set_num_threads(num_threads)


def _count(text: str) -> int:
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error  # argparse does not show the text of a ValueError


if __name__ == "__main__":
    main()
