"""Rows of a benchmark: printed as tables, judged against goals, written as JSON."""

import importlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from timing import Timings

from lightning_cxl.commands.parsers import write_text
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.speeds import QUIET_FRACTION, cpu_model
from lightning_cxl.machine.topology import read_meminfo, read_text
from lightning_cxl.native import _cpu
from lightning_cxl.text import table_lines


@dataclass(frozen=True)
class Row:
    """One number."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    holds: bool | None = None


@dataclass
class Results:
    """What was measured so far, in order."""

    machine: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str) -> None:
        """Add a number without a goal."""
        self.rows.append(Row(name, value, unit))

    def at_most(self, name: str, value: float, unit: str, goal: float) -> None:
        """Add and print a number that should not be above its goal."""
        self._judge(Row(name, value, unit, goal, value <= goal), "at most")

    def at_least(self, name: str, value: float, unit: str, goal: float) -> None:
        """Add and print a number that should not be below its goal."""
        self._judge(Row(name, value, unit, goal, value >= goal), "at least")

    def table(self, title: str, timings: Timings, numel: int, base: str) -> None:
        """Print what a group of contenders took per parameter, and add it.

        Args:
            title: of the table, and the beginning of its rows' names.
            timings: of all contenders.
            numel: parameters that one run goes over.
            base: the contender that others are compared with.
        """
        print(f"\n{title}")
        rows = [("", "ns/parameter", "spread", f"x {base}", "GB/s")]
        for name in timings.seconds:
            seconds = timings.median(name)
            self.add(f"{title}: {name}", seconds / numel * 1e9, "ns/parameter")
            traffic = timings.traffic_bytes[name]
            rows.append(
                (
                    name,
                    f"{seconds / numel * 1e9:.3f}",
                    f"{timings.spread(name):.0%}",
                    f"{timings.ratio(name, base):.2f}",
                    f"{traffic / seconds / 1e9:.1f}" if traffic else "",
                )
            )
        print_columns(rows)
        for name, why in timings.skipped.items():
            print(f"  {name}: skipped, {why}")
        self.add(f"{title}: CPU time of other processes", timings.others_fraction, "of all")
        if timings.others_fraction > QUIET_FRACTION:
            print(f"  doubtful: other processes took {timings.others_fraction:.0%} of the CPU time meanwhile")

    def write(self, path: Path) -> None:
        """Write machine and rows as JSON."""
        write_text(path, json.dumps({"machine": self.machine, "rows": [asdict(row) for row in self.rows]}, indent=1))

    def summary(self) -> str:
        """Return how many goals hold and the lines of those that do not."""
        judged = [row for row in self.rows if row.holds is not None]
        missed = [row for row in judged if not row.holds]
        lines = [f"{len(judged) - len(missed)} of {len(judged)} goals hold"]
        lines += [f"  missed: {row.name}: {row.value:.3f} {row.unit}, goal {row.goal:g}" for row in missed]
        return "\n".join(lines)

    def _judge(self, row: Row, relation: str) -> None:
        self.rows.append(row)
        verdict = "holds" if row.holds else "MISSED"
        print(f"  {row.name}: {row.value:.3f} {row.unit}, goal {relation} {row.goal:g}: {verdict}")


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print a table; its first row has the titles, and its first column is text, the others are numbers."""
    header, *others = rows
    print("\n".join(table_lines(header, others, indent=2)))


def machine(num_threads: int) -> dict[str, Any]:
    """Return what the numbers depend on besides the code: CPU, threads, memory, kernel and versions."""
    return {
        "cpu": cpu_model(),
        "threads": num_threads,
        "available_threads": _cpu.available_threads(),
        "isa": _cpu.best_isa(),
        "memory_bytes": read_meminfo(Path("/proc/meminfo")).get("MemTotal", 0),
        "transparent_hugepage": read_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")) or "",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def check_matplotlib() -> None:
    """Check, before an hour is spent on measuring, that there is something to plot with.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise ConfigError(
            "--plot needs matplotlib: `pip install matplotlib`, or install this package with its extra `plot`"
        ) from error
