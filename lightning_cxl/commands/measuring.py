"""Measurements: contenders that take turns, and loops that only move a kernel's bytes.

Contenders run in random order, interleaved, so that a noisy machine disturbs all of them alike.
"""

import gc
import os
import platform
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_cxl.machine.speeds import cpu_model
from lightning_cxl.native import _cpu, _membench

_TURN_SECONDS = 0.03
# threads of an OpenMP pool wait for more work in a loop for about 10 ms, and torch has a pool of its own
_PAUSE_SECONDS = 0.02
_SLOW = 8.0
_SLOW_ROUNDS = 3


@dataclass(frozen=True)
class Contender:
    """Something that is timed."""

    name: str
    make: Callable[[], Callable[[], object]]
    """Returns what is timed; imports and allocates what it needs."""
    optional: bool = False
    """An exception in `make` or in the first run leaves it out, with a line that says why."""
    traffic_bytes: int = 0
    """Bytes that a run must move from and to memory; 0: not counted."""


@dataclass
class Timings:
    """Seconds per run of every contender, round by round; None where a contender was not run."""

    seconds: dict[str, list[float | None]] = field(default_factory=dict)
    first_seconds: dict[str, float] = field(default_factory=dict)
    """The very first run of each: with compilation, and with the making of state."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why optional contenders did not run."""
    traffic_bytes: dict[str, int] = field(default_factory=dict)
    others_fraction: float = 0.0
    """Part of the machine's CPU time that other processes took during the rounds: they make all numbers doubtful."""

    def __contains__(self, name: str) -> bool:
        return name in self.seconds

    def median(self, name: str) -> float:
        """Return the median seconds of one contender."""
        return statistics.median(_known(self.seconds[name]))

    def spread(self, name: str) -> float:
        """Return how far the slowest and the fastest round are apart, in medians."""
        known = _known(self.seconds[name])
        return (max(known) - min(known)) / statistics.median(known)

    def ratio(self, name: str, base: str) -> float:
        """Return the median over rounds of seconds in units of the base's: a round saw the same noise."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs if mine is not None and theirs is not None)

    def fastest(self, names: Iterable[str]) -> str | None:
        """Return the one of `names` with the lowest median, None when none of them ran."""
        return min((name for name in names if name in self), key=self.median, default=None)


def measure(contenders: Sequence[Contender], rounds: int) -> Timings:
    """Time all contenders, `rounds` turns each; much slower ones get three, after the others, which stay together.

    A short run is repeated until its turn takes long enough, after one run that is not counted: its data then
    comes from where it lies between steps that follow each other, which for small sizes is a cache.
    """
    timings = Timings()
    runs = _make(contenders, timings)
    estimates = {name: _timed(run) for name, run in runs.items()}
    timings.seconds = {name: [] for name in runs}
    slow = [name for name in runs if estimates[name] > _SLOW * min(estimates.values())]
    fast = [name for name in runs if name not in slow]
    order = random.Random(0)
    gc.collect()
    gc.disable()
    start = cpu_seconds()
    try:
        for index in range(rounds):
            for name in order.sample(fast, len(fast)) + order.sample(slow, len(slow)):
                due = name in fast or _is_due(index, rounds)
                turn = _turn(runs[name], estimates[name]) if due else None
                timings.seconds[name].append(turn)
    finally:
        gc.enable()
    timings.others_fraction = others_fraction(start, cpu_seconds())
    return timings


def _make(contenders: Sequence[Contender], timings: Timings) -> dict[str, Callable[[], object]]:
    """Make all contenders and run each once; return those that can run."""
    runs = {}
    for contender in contenders:
        try:
            run = contender.make()
            timings.first_seconds[contender.name] = _timed(run)
        except Exception as error:
            if not contender.optional:
                raise
            timings.skipped[contender.name] = reason(error)
        else:
            runs[contender.name] = run
            timings.traffic_bytes[contender.name] = contender.traffic_bytes
    return runs


def reason(error: Exception) -> str:
    """Return an exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _turn(run: Callable[[], object], estimate: float) -> float:
    time.sleep(_PAUSE_SECONDS)  # until the threads of the contender before have gone to sleep
    repeats = min(1000, max(1, round(_TURN_SECONDS / max(estimate, 1e-9))))
    if repeats > 1:
        run()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _is_due(index: int, rounds: int) -> bool:
    """Return whether a slow contender runs in this round: in three of them, the first and spread out."""
    return index % max(1, -(-rounds // _SLOW_ROUNDS)) == 0


def cpu_seconds(root: str = "/") -> tuple[float, float, float]:
    """Return seconds that all CPUs were busy, all there were, and this process and its ended children used.

    Zeros where nobody tells.
    """
    try:
        fields = Path(root, "proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return 0.0, 0.0, 0.0
    # user, nice, system, idle, iowait, irq, softirq, steal; guests are in user already
    ticks = [int(value) / os.sysconf("SC_CLK_TCK") for value in fields[1:9]]
    children = os.times()
    own = time.process_time() + children.children_user + children.children_system
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks), own


def others_fraction(start: tuple[float, float, float], end: tuple[float, float, float]) -> float:
    """Return the part of all CPU time that other processes took between two calls of `cpu_seconds`."""
    busy, total, own = (after - before for before, after in zip(start, end, strict=True))
    return max(0.0, busy - own) / total if total > 0 else 0.0


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# Streams of bytes: the fastest that this machine's memory lets a kernel be.

_CALIBRATION_RUNS = 5
# prefetchers of all CPUs we know follow at least so many places at once
_MAX_PLACES = 8
_LINE = 64


class Stream(NamedTuple):
    """Bytes that are touched once, in order."""

    address: int
    nbytes: int
    access: int


def read(tensor: torch.Tensor) -> Stream:
    """Return the stream of a dense tensor that a kernel reads."""
    return Stream(tensor.data_ptr(), tensor.numel() * tensor.element_size(), _membench.READ)


def update(tensor: torch.Tensor) -> Stream:
    """Return the stream of a dense tensor that a kernel reads and writes in place."""
    return Stream(tensor.data_ptr(), tensor.numel() * tensor.element_size(), _membench.UPDATE)


def write(tensor: torch.Tensor) -> Stream:
    """Return the stream of a dense tensor, aligned to a cache line, that is overwritten past the caches."""
    return Stream(tensor.data_ptr(), tensor.numel() * tensor.element_size(), _membench.WRITE_PAST_CACHE)


class Roof:
    """One pass over the bytes of a kernel; contents stay as they are, except what is only written. Call it to run it.

    The fastest loop differs from CPU to CPU by up to a tenth: how wide loads are, and whether a thread walks one place
    of a tensor or several. All are tried, and the fastest is the roof.

    Args:
        groups: per span of the kernel, the streams that it walks side by side.
        max_places: of all streams together that a thread walks at once, at least one of each.
    """

    def __init__(self, groups: Sequence[Sequence[Stream]], num_threads: int, max_places: int = _MAX_PLACES) -> None:
        self.num_threads = num_threads
        self.isa, self._table = self._fastest(list(_variants(groups, max_places)))

    def __call__(self) -> None:
        """Run one pass."""
        _membench.sweep(self._table, self.num_threads, self.isa)

    def _fastest(self, variants: "list[tuple[str, array[int]]]") -> "tuple[str, array[int]]":
        """Return the variant with the fastest run, of several runs of each in turn."""
        best = [float("inf")] * len(variants)
        for _ in range(_CALIBRATION_RUNS):
            for index, (isa, table) in enumerate(variants):
                start = time.perf_counter()
                _membench.sweep(table, self.num_threads, isa)
                best[index] = min(best[index], time.perf_counter() - start)
        return variants[best.index(min(best))]


def _variants(groups: Sequence[Sequence[Stream]], max_places: int) -> "Iterator[tuple[str, array[int]]]":
    places = {1}
    if len(groups) == 1:
        places.add(max(1, max_places // len(groups[0])))
    for num_places in sorted(places):
        table = _table(groups, num_places)
        for isa in _cpu.supported_isas():
            yield isa, table


def _table(groups: Sequence[Sequence[Stream]], num_places: int) -> "array[int]":
    """Return the table for `_membench.sweep`, every stream cut into so many that are walked side by side."""
    table = array("Q")
    for index, group in enumerate(groups):
        for stream in group:
            length = stream.nbytes // num_places // _LINE * _LINE
            for place in range(num_places):
                begin = place * length
                end = stream.nbytes if place == num_places - 1 else begin + length
                table.extend((index, stream.address + begin, end - begin, stream.access))
    return table


def machine_facts() -> dict[str, Any]:
    """Return what measured numbers depend on besides the code: CPU, threads, memory, kernel and versions."""
    return {
        "cpu": cpu_model(),
        "threads": _cpu.available_threads(),
        "available_threads": _cpu.available_threads(),
        "isa": _cpu.best_isa(),
        "memory_bytes": _memory_bytes(),
        "transparent_hugepage": _read("/sys/kernel/mm/transparent_hugepage/enabled").strip(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _memory_bytes() -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
