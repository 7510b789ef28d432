"""Contenders that run in random order, interleaved, so that a noisy machine disturbs all of them alike."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lightning_cxl.commands.calibrate import cpu_seconds, others_fraction

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


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
