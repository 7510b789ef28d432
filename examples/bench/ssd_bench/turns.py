"""The turns of all contenders over one file, what they took, and the table of it."""

import argparse
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adam_bench.problems import fits
from results import Results, machine, print_columns
from timing import Timings

from lightning_cxl.commands.calibrate import cpu_seconds, others_fraction
from lightning_cxl.commands.parsers import check_target
from lightning_cxl.machine.speeds import QUIET_FRACTION
from lightning_cxl.native import _cpu
from lightning_cxl.text import format_bytes, parse_bytes
from ssd_bench import fio
from ssd_bench.contenders import (
    ALONE,
    OURS,
    DiskContender,
    Job,
    fio_contenders,
    our_contenders,
    our_engine,
    plain_loop,
)
from ssd_bench.disk_area import BLOCK_BYTES, disk_area

GOAL = 0.95
_GIB = 2**30
Peers = Callable[[Job, bool], Iterable[DiskContender]]
"""Yields more contenders for reads (False) or writes (True) of a job."""


@dataclass(frozen=True)
class Turns:
    """What all contenders took, round by round."""

    timings: Timings
    cpu_seconds: Mapping[str, list[float]]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that `run` takes."""
    parser = argparse.ArgumentParser(
        "python examples/bench/ssd.py",
        description=description,
        epilog="example: python examples/bench/ssd.py --folder /nvme --sizes 64KiB",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk (default: the current folder)")
    parser.add_argument("--bytes", type=_blocks, default=_GIB, metavar="SIZE", help="of the file (default: 1GiB)")
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=_blocks,
        default=[64 << 10, 1 << 20, 16 << 20, 256 << 20],
        metavar="SIZE",
        help="of a tensor (default: 64KiB 1MiB 16MiB 256MiB)",
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns of each contender (default: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    return parser


def run(parser: argparse.ArgumentParser, args: argparse.Namespace, peers: Peers | None) -> None:
    """Measure as the options of `make_parser` say, and with more contenders where `peers` has some.

    Raises:
        ConfigError: the folder or the file of numbers cannot be written.
    """
    sizes = sorted(set(args.sizes))
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if sizes[-1] > args.bytes:
        parser.error(f"a tensor of {format_bytes(sizes[-1])} does not fit into --bytes {format_bytes(args.bytes)}")
    check_target(args.json)
    results = Results(machine(_cpu.available_threads()))
    print("\n".join(f"{key}: {value}" for key, value in results.machine.items()))
    if not fio.is_installed():
        print("fio is not installed: it is left out")
    if not fits(args.bytes, "as much memory as the file has"):
        return
    with disk_area(args.folder, args.bytes) as area, our_engine(area) as engine:
        if not area.direct:
            print(f"the filesystem of `{args.folder}` refuses O_DIRECT: all go through the page cache")
        for size in sizes:
            job = Job(area, size)
            for writes in (False, True):
                contenders = [*our_contenders(job, engine, writes=writes), plain_loop(job, writes=writes)]
                if fio.is_installed():
                    contenders += fio_contenders(job, writes=writes)
                if peers is not None:
                    contenders += peers(job, writes)
                title = f"{'write' if writes else 'read'}, {job.nbytes // size} tensors of {format_bytes(size)}"
                show(results, title, job.nbytes, take_turns(contenders, args.rounds, area.forget))
    print(f"\n{results.summary()}")
    if args.json:
        results.write(args.json)


def take_turns(contenders: Sequence[DiskContender], rounds: int, before: Callable[[], None]) -> Turns:
    """Let all contenders go once in each round, in random order, after a first time that does not count.

    Args:
        contenders: in the order of the table.
        rounds: that count.
        before: called before each turn.
    """
    timings = Timings()
    processor: dict[str, list[float]] = {}
    for contender in contenders:
        timings.first_seconds[contender.name] = contender.go().seconds
        timings.seconds[contender.name] = []
        processor[contender.name] = []
    order = random.Random(0)
    start = cpu_seconds()
    for _ in range(rounds):
        for contender in order.sample(contenders, len(contenders)):
            before()
            turn = contender.go()
            timings.seconds[contender.name].append(turn.seconds)
            processor[contender.name].append(turn.cpu_seconds)
    timings.others_fraction = others_fraction(start, cpu_seconds())
    return Turns(timings, processor)


def show(results: Results, title: str, nbytes: int, turns: Turns) -> None:
    """Print what contenders reached, add it, and judge ours against the fastest of the others."""
    timings = turns.timings
    best = timings.fastest(name for name in timings.seconds if name not in (OURS, ALONE))
    assert best is not None  # the plain loop is always there
    print(f"\n{title}")
    rows: list[tuple[str, ...]] = [("", "GB/s", "spread", f"x {best}", "CPU s/GiB")]
    for name in timings.seconds:
        speed = nbytes / timings.median(name) / 1e9
        processor = statistics.median(turns.cpu_seconds[name]) * _GIB / nbytes
        ratio = timings.ratio(best, name)
        rows.append((name, f"{speed:.2f}", f"{timings.spread(name):.0%}", f"{ratio:.2f}", f"{processor:.3f}"))
        results.add(f"{title}: {name}", speed, "GB/s")
        results.add(f"{title}: {name}: CPU time", processor, "s/GiB")
    print_columns(rows)
    results.at_least(f"{title}: {OURS} / {best}", timings.ratio(best, OURS), "x", GOAL)
    results.add(f"{title}: CPU time of other processes", timings.others_fraction, "of all")
    if timings.others_fraction > QUIET_FRACTION:
        print(f"  doubtful: other processes took {timings.others_fraction:.0%} of the CPU time meanwhile")


def _blocks(text: str) -> int:
    try:
        nbytes = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error  # argparse does not show the text of a ValueError
    if nbytes == 0 or nbytes % BLOCK_BYTES:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {BLOCK_BYTES} bytes, as disks need it")
    return nbytes
