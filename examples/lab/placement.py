"""Throughput of placement policies on the machine of arXiv 2507.03305, predicted, not measured.

    python examples/lab/placement.py [--json FILE] [--plot FILE.png] [--quick] [--tflops N]

Every number is a step's throughput in that of the same step with all memory in DRAM, as if there were enough of it.
The machines are `examples/machines/paper_a.yaml` and `paper_a_two_cards.yaml`, with speeds fitted to the authors' raw
data; the model is `lightning_cxl/planning/job.py`. What the GPU computes was not published: 150 Tflop/s are
assumed, and the last table shows what depends on that.

The goals are the paper's claims for its own policy (abstract of version 2: 97 to 99 % with one card, about 100 % with
two, up to 21 % over naive interleaving), and that ours, `bandwidth`, is never slower than it, and faster where it
cannot keep in DRAM all that the CPUs stream.
"""

import argparse
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bench_path  # noqa: F401  # where `results` is
from footprint import ModelShape, split_masters
from results import Results, Row, check_matplotlib, print_columns
from schedule.paper import CLAIMS, MODELS, OUR_LAYOUT, PAPER_LAYOUT, THROUGHPUT_GOALS, paper_machine

from lightning_cxl.machine.speeds import Machine
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.job import Job, StepTime
from lightning_cxl.planning.policies import PolicyPlan, compare, dram_only_time

NAIVE, PAPERS, OURS = POLICIES = ("interleave", "latency_first", "bandwidth")
OVER_NAIVE, ABOUT = 1.21, 0.05
"""The most that the paper's policy gains over interleaving, and how close to it counts as "about"."""
STRICTLY = 1e-6
TFLOPS = (75.0, 150.0, 300.0)
_GRID = ((1, 4096), (8, 4096), (16, 4096), (1, 8192), (1, 16384), (1, 32768), (2, 32768), (3, 32768))
"""Sequences and tokens of each: the grid of the authors' run.sh, and 8K and 16K."""
_QUICK_GRID = ((1, 4096), (1, 32768))
_NUM_CARDS = (1, 2)
_LAYOUTS: Mapping[str, Callable[[ModelShape, int, int], Job]] = {
    PAPER_LAYOUT.name: PAPER_LAYOUT.job,  # updates after the backward, as theirs
    OUR_LAYOUT.name: OUR_LAYOUT.job,
    "14 B/parameter, update behind the next forward": partial(split_masters, overlap="forward"),
    "12 B/parameter, update behind the backward": partial(split_masters, overlap="backward"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One job on one machine, under every policy."""

    layout: str
    shape: ModelShape
    batch: int
    context: int
    num_cards: int
    job: Job
    machine: Machine
    plans: Mapping[str, PolicyPlan]
    dram_only: StepTime

    @property
    def name(self) -> str:
        return f"{self.shape.name}, {self.batch} x {self.context}"

    @property
    def row_name(self) -> str:
        return f"{self.name}, {self.layout}, {_cards(self.num_cards)}"

    def seconds(self, policy: str) -> float:
        time = self.plans[policy].time
        if time is None:
            raise ValueError(f"{self.row_name} does not fit: {self.plans[policy].error}")
        return time.seconds

    def relative(self, policy: str) -> float:
        """Return the throughput in that of DRAM alone."""
        return self.dram_only.seconds / self.seconds(policy)

    def over_naive(self) -> float:
        return self.seconds(NAIVE) / self.seconds(PAPERS)

    def ours_over_papers(self) -> float:
        return self.seconds(PAPERS) / self.seconds(OURS)

    def left_out_of_dram(self) -> list[TensorRole]:
        """Return the roles that the CPUs stream and of which the paper's policy has a part on the cards."""
        streamed = {each.role for each in self.job.classes if any(move.kind == "cpu" for move in each.moves)}
        cards = {tier.name for tier in self.machine.select(TierKind.CXL)}
        placed = self.plans[PAPERS].bytes_on
        return [role for role in placed if role in streamed and any(placed[role].get(card) for card in cards)]


def predict(
    layout: str,
    shape: ModelShape,
    batch: int,
    context: int,
    num_cards: int,
    tflops: float,
    policies: Sequence[str] = POLICIES,
) -> Cell:
    """Return the predictions for one job."""
    machine = paper_machine(num_cards, tflops * 1e12)
    job = _LAYOUTS[layout](shape, batch, context)
    plans = compare(job, machine, policies)
    return Cell(layout, shape, batch, context, num_cards, job, machine, plans, dram_only_time(job, machine))


def least_update_s(job: Job, machine: Machine) -> float:
    """Return what no placement's update is faster than, where it does not overlap.

    The cards stream at least what is left when DRAM holds the classes of which most is streamed per byte that is
    stored; all tiers together have one bandwidth.
    """
    classes = [(each.nbytes, sum(m.nbytes for m in each.moves if m.kind == "cpu")) for each in job.classes]
    room = float(sum(tier.capacity_bytes for tier in machine.select(TierKind.DRAM)))
    all_bytes = on_cards = sum(streamed for _, streamed in classes)
    for nbytes, streamed in sorted(classes, key=lambda each: -each[1] / max(1, each[0])):
        on_cards -= streamed * min(1.0, room / max(1, nbytes))
        room = max(0.0, room - nbytes)
    cards = sum(tier.adam_bytes_per_s for tier in machine.select(TierKind.CXL))
    dram = sum(tier.adam_bytes_per_s for tier in machine.select(TierKind.DRAM))
    return max(on_cards / cards, all_bytes / (cards + dram))


def judge(cell: Cell, results: Results) -> list[str]:
    """Add a cell's numbers; returns what is to be said about it, one line per goal that is missed."""
    papers, ratio = cell.relative(PAPERS), cell.ours_over_papers()
    spills = cell.left_out_of_dram()
    goal, note = (1 + STRICTLY, ", must be faster") if spills else (1 - STRICTLY, "")
    throughput_goal = THROUGHPUT_GOALS[cell.num_cards]
    results.add(f"{cell.row_name}: {NAIVE}", cell.relative(NAIVE), "x DRAM only")
    results.rows += [
        Row(f"{cell.row_name}: {PAPERS}", papers, "x DRAM only", throughput_goal, papers >= throughput_goal),
        Row(f"{cell.row_name}: {OURS}{note}", ratio, f"x {PAPERS}", goal, ratio >= goal),
    ]
    results.add(f"{cell.row_name}: {OURS}", cell.relative(OURS), "x DRAM only")
    results.add(f"{cell.row_name}: {PAPERS}", cell.over_naive(), f"x {NAIVE}")
    roles = ", ".join(role.value for role in spills)
    missed = []
    if papers < throughput_goal:
        own, dram = cell.plans[PAPERS].time, cell.dram_only
        took = 0.0 if own is None else own.update.seconds
        missed.append(
            f"{PAPERS} {papers:.1%}, goal {throughput_goal:.0%}: not all of {roles} fits in DRAM, so the update takes "
            f"{took:.2f} s instead of {dram.update.seconds:.2f} s of a step of {dram.seconds:.2f} s"
        )
    if ratio < goal:
        missed.append(f"{OURS} {_why_not_faster(cell)}")
    return missed


def _why_not_faster(cell: Cell) -> str:
    ours = cell.plans[OURS].time
    ratio = cell.ours_over_papers()
    if ours is None or ratio < 1 - STRICTLY:
        return f"is slower than {PAPERS}: {ratio:.6f}"
    least = least_update_s(cell.job, cell.machine)
    if cell.job.overlap == "none" and ours.update.seconds <= least * (1 + STRICTLY):
        return (
            f"equals {PAPERS}: DRAM is full of bytes that are worth the same, and no placement's update is shorter "
            f"than its {least:.2f} s"
        )
    return f"equals {PAPERS}; whether a placement is faster is not known"


def placement_section(cells: Sequence[Cell], results: Results) -> None:
    """Print a table per layout and number of cards, and add all numbers."""
    for layout, num_cards in dict.fromkeys((each.layout, each.num_cards) for each in cells):
        print(f"\n{layout}, {_cards(num_cards)}: predicted throughput, relative to DRAM only")
        header = "DRAM only, s", *POLICIES, f"{PAPERS} / {NAIVE}", f"{OURS} / {PAPERS}"
        rows: list[Sequence[str]] = [("", *header, "")]
        missed: dict[str, list[str]] = {}
        for cell in cells:
            if (cell.layout, cell.num_cards) != (layout, num_cards):
                continue
            why = judge(cell, results)
            for each in why:
                missed.setdefault(each, []).append(cell.name)
            relative = (f"{cell.relative(policy):.3f}" for policy in POLICIES)
            ratios = f"{cell.over_naive():.3f}", f"{cell.ours_over_papers():.4f}"
            rows.append((cell.name, f"{cell.dram_only.seconds:.2f}", *relative, *ratios, "MISSED" if why else "holds"))
        print_columns(rows)
        for each, names in missed.items():
            print(f"  missed: {'; '.join(names)}: {each}")


def gain_section(cells: Iterable[Cell], results: Results) -> None:
    """Print and judge the most that the paper's policy gains over interleaving in the paper's layout."""
    print(f"\nthe most that {PAPERS} gains over {NAIVE}; the paper says up to {OVER_NAIVE}")
    best = max((each for each in cells if each.layout == PAPER_LAYOUT.name), key=Cell.over_naive)
    name = f"most over {NAIVE}: {best.row_name}"
    results.at_least(name, best.over_naive(), f"x {NAIVE}", OVER_NAIVE - ABOUT)
    results.at_most(name, best.over_naive(), f"x {NAIVE}", OVER_NAIVE + ABOUT)
    naive, flops = best.plans[NAIVE].time, best.machine.device.flops / 1e12
    if naive is not None and best.over_naive() > OVER_NAIVE + ABOUT:
        print(
            f"  reason: with {flops:g} Tflop/s assumed, {naive.update.seconds:.2f} s of {NAIVE}'s "
            f"{naive.seconds:.2f} s are the update; a slower device makes the gain smaller"
        )


def flops_section(sizes: Sequence[tuple[int, int]], results: Results) -> None:
    """Print how the paper's policy in the paper's layout depends on what the GPU computes."""
    print(f"\n{PAPER_LAYOUT.name}: {PAPERS} relative to DRAM only, and over {NAIVE}, by assumed Tflop/s")
    columns = [(tflops, cards) for cards in _NUM_CARDS for tflops in TFLOPS]
    rows = [["", *(f"{tflops:g}, {_cards(cards)}" for tflops, cards in columns)]]
    for shape in MODELS:
        for batch, context in sizes:
            shown = []
            for tflops, cards in columns:
                cell = predict(PAPER_LAYOUT.name, shape, batch, context, cards, tflops, (NAIVE, PAPERS))
                name = f"{cell.row_name}, {tflops:g} Tflop/s: {PAPERS}"
                results.add(name, cell.relative(PAPERS), "x DRAM only")
                results.add(name, cell.over_naive(), f"x {NAIVE}")
                shown.append(f"{cell.relative(PAPERS):.3f} ({cell.over_naive():.2f})")
            rows.append([f"{shape.name}, {batch} x {context}", *shown])
    print_columns(rows)


def draw(cells: Sequence[Cell], path: Path, subtitle: str) -> None:
    """Write bars of all policies: a row per layout, a panel per model and number of cards."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    layouts = list(dict.fromkeys(each.layout for each in cells))
    panels = list(dict.fromkeys((each.shape.name, each.num_cards) for each in cells))
    figure, grid = pyplot.subplots(
        len(layouts), len(panels), figsize=(16, 3 * len(layouts) + 1), sharey=True, squeeze=False, layout="constrained"
    )
    for layout, line in zip(layouts, grid, strict=True):
        for (model, num_cards), axes in zip(panels, line, strict=True):
            own = [c for c in cells if (c.layout, c.shape.name, c.num_cards) == (layout, model, num_cards)]
            for k, policy in enumerate(POLICIES):
                at = [i + 0.27 * (k - 1) for i in range(len(own))]
                axes.bar(at, [each.relative(policy) for each in own], 0.27, label=policy)
            axes.axhline(THROUGHPUT_GOALS[num_cards], color="black", linewidth=0.8, linestyle="--")
            axes.set(title=f"{model}, {_cards(num_cards)}\n{layout}", ylim=(0.65, 1.15))
            axes.title.set_fontsize("small")
            axes.set_xticks(range(len(own)), [f"{c.batch} x {c.context // 1024}K" for c in own], fontsize="x-small")
    figure.supylabel("predicted throughput, DRAM only = 1")
    figure.suptitle(f"Placement policies, predicted, not measured\n{subtitle}", fontsize="medium")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(POLICIES))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cards(num: int) -> str:
    return f"{num} card{'s' * (num > 1)}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two sizes and two layouts only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them as bars")
    parser.add_argument("--tflops", type=float, default=150.0, help="of the device, sustained; assumed (150)")
    args = parser.parse_args(arguments)
    if args.plot:
        check_matplotlib()
    sizes = _QUICK_GRID if args.quick else _GRID
    layouts = (PAPER_LAYOUT.name, OUR_LAYOUT.name) if args.quick else tuple(_LAYOUTS)
    cells = [
        predict(layout, shape, batch, context, num_cards, args.tflops)
        for layout in layouts
        for num_cards in _NUM_CARDS
        for shape in MODELS
        for batch, context in sizes
    ]
    machine = cells[0].machine
    subtitle = f"{machine.source}: {args.tflops:g} Tflop/s"
    print(f"predicted, not measured; {subtitle}\n{CLAIMS}")
    results = Results({"predicted": True, "machine": machine.name, "source": machine.source, "tflops": args.tflops})
    placement_section(cells, results)
    gain_section(cells, results)
    flops_section(sizes, results)
    print(f"\n{results.summary()}")
    if args.json:
        results.write(args.json)
    if args.plot:
        draw(cells, args.plot, subtitle)


if __name__ == "__main__":
    main()
