"""``python -m lightning_cxl bench adam``: the optimizer step and the gradient check against memory and torch."""

import argparse
import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_cxl.commands.bench.contenders import ROOF, Options, check_contenders, state_contenders, step_contenders
from lightning_cxl.commands.bench.tensors import Problem, filled, fits, one_tensor, parse_count
from lightning_cxl.commands.measuring.files import check_target
from lightning_cxl.commands.measuring.results import Results, machine
from lightning_cxl.commands.measuring.timing import measure
from lightning_cxl.native import _cpu

_DESCRIPTION = """\
Time per parameter of CPUAdam and of the gradient check on this machine, against the roof (a loop that only moves the
same bytes with the same threads) and against torch's fused AdamW. Contenders take turns in one process; tables show
medians, the spread of all rounds, and the median of the rounds' ratios."""


def main(arguments: Sequence[str]) -> None:
    """Measure what the arguments ask for; print tables and write JSON."""
    parser = make_parser(
        "python -m lightning_cxl bench adam", _DESCRIPTION, "python -m lightning_cxl bench adam --sizes 1M 20M"
    )
    args = parser.parse_args(arguments)
    options, results = begin(parser, args)
    for size in options.sizes:
        _time_step(results, options, size)
    for dtype, name in ((torch.float32, "fp32 weights"), (torch.bfloat16, "split bf16 weights")):
        _time_states(results, options, dtype, name)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        _time_check(results, options, dtype, name)
    if args.json:
        results.write(args.json)


def _time_step(results: Results, options: Options, size: int) -> None:
    layout = one_tensor(size)
    if fits(24 * size, f"the fp32 step on {layout.label}"):  # CPUAdam makes momentum and variance of its own
        contenders = step_contenders(Problem.make(layout), options.num_threads)
        results.table(f"fp32 step, {layout.label}", measure(contenders, options.rounds), size, ROOF)


def _time_states(results: Results, options: Options, dtype: torch.dtype, name: str) -> None:
    layout = one_tensor(options.main_size)
    if fits(38 * layout.numel, f"state formats on {layout.label}"):
        contenders = state_contenders(Problem.make(layout, dtype), options.num_threads)
        title = f"state formats, {name}, {layout.label}"
        results.table(title, measure(contenders, options.rounds), layout.numel, "fp32")


def _time_check(results: Results, options: Options, dtype: torch.dtype, name: str) -> None:
    layout = one_tensor(options.main_size)
    if fits(dtype.itemsize * layout.numel, f"the gradient check on {layout.label}"):
        contenders = check_contenders(filled(layout, dtype, 0.01), options.num_threads)
        title = f"gradient check, {name}, {layout.label}"
        results.table(title, measure(contenders, options.rounds), layout.numel, ROOF)


# -- the command line, which `examples/bench/adam.py` shares -----------------------------------------------------------


def make_parser(program: str, description: str | None, example: str) -> argparse.ArgumentParser:
    """Return a parser of sizes, rounds, threads and the file of numbers."""
    parser = argparse.ArgumentParser(
        program,
        description=description,
        epilog=f"example: {example}",
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
