"""What `replay.py` prints and writes: tables, their goals, and the figures to compare with."""

import gc
import statistics

import bench_path  # noqa: F401  # where `results` is
from results import Results, print_columns
from simulation.trace import Trace

from schedule.paper import CLAIMS, GIB, MODELS, OUR_LAYOUT, PAPER_LAYOUT, THROUGHPUT_GOALS, NamedLayout
from schedule.replay import MODES, Replay, Setting, closed_form, contenders

_GRID_OF_THE_PAPER = ((1, 4096), (8, 4096), (16, 4096), (1, 32768), (3, 32768))


def replay_section(
    results: Results, *, quick: bool, flops_per_s: float, dram_bytes: int, batch: int, context: int, step_s: float
) -> dict[str, Trace]:
    """Execute every placement for both models; returns timelines to draw.

    Args:
        results: gets the numbers.
        quick: one model and few steps.
        flops_per_s: of the device.
        dram_bytes: of the machine.
        batch: sequences of a step.
        context: tokens of a sequence.
        step_s: seconds that the replay of a step takes, with all in DRAM.
    """
    print(
        f"\nreplay: {flops_per_s / 1e12:g} Tflop/s sustained (the paper does not say), {dram_bytes / GIB:g} GiB of DRAM"
        f"\n{CLAIMS}"
    )
    drawn = {}
    for shape in MODELS[:1] if quick else MODELS:
        for mode in MODES:
            setting = Setting(shape, batch, context, flops_per_s, dram_bytes, mode)
            for layout in (PAPER_LAYOUT, OUR_LAYOUT):
                title = f"{setting.name}, {layout.name}, updates {mode}"
                trace = _replay_layout(results, title, setting, layout, step_s, rounds=1 if quick else 3)
                if layout is OUR_LAYOUT:
                    drawn[f"{title}: ours, 1 card"] = trace
    for mode in MODES:
        _print_closed_forms(flops_per_s, dram_bytes, mode)
    return drawn


def _replay_layout(
    results: Results, title: str, setting: Setting, layout: NamedLayout, step_s: float, rounds: int
) -> Trace:
    """Let all placements take turns; print and add what they took."""
    chosen = [each for each in contenders() if each.layout is layout]
    time_scale = step_s / closed_form(setting, chosen[0]).step_s
    replays = [Replay(setting, contender, time_scale) for contender in chosen]
    for _ in range(1 + rounds):
        for each in replays:
            each.step()
    traces = {each.contender.name: each.close() for each in replays}
    gc.collect()
    print(f"\n{title}")
    rows = [("", "s per step", "spread", "of DRAM only", "closed form s", "of DRAM only")]
    relative = [_ratio(replays[0], each) for each in replays]
    for each, value in zip(replays, relative, strict=True):
        taken = sorted(each.steps_s[1:])
        rows.append(
            (
                each.contender.name,
                f"{statistics.median(taken):.2f}",
                f"{(taken[-1] - taken[0]) / statistics.median(taken):.1%}",
                f"{value:.3f}",
                f"{each.closed_s:.2f}",
                f"{replays[0].closed_s / each.closed_s:.3f}",
            )
        )
    print_columns(rows)
    naive: Replay | None = None
    for each, value in zip(replays, relative, strict=True):
        name = f"{title}: {each.contender.name}"
        if each.contender.policy in ("latency_first", "bandwidth"):
            results.at_least(name, value, "x DRAM only", THROUGHPUT_GOALS[each.contender.num_cards])
        else:
            results.add(name, value, "x DRAM only")
        naive = each if each.contender.policy == "interleave" else naive
        if each.contender.policy == "latency_first" and naive is not None:
            results.add(name, _ratio(naive, each), "x naive interleave")
            print(f"  {name}: {_ratio(naive, each):.3f} x naive interleave (the paper: up to 1.21)")
    return traces["ours, 1 card"]


def _ratio(base: Replay, other: Replay) -> float:
    """Return the throughput in that of `base`: the median of the rounds' ratios, without the first round."""
    return statistics.median(b / o for b, o in zip(base.steps_s[1:], other.steps_s[1:], strict=True))


def _print_closed_forms(flops_per_s: float, dram_bytes: int, mode: str) -> None:
    """Print the max model's throughput for the whole grid of the paper: most of it is not executed."""
    print(f"\nclosed form, throughput of DRAM only, updates {mode}")
    columns = [(shape, *sizes) for shape in MODELS for sizes in _GRID_OF_THE_PAPER]
    settings = [Setting(shape, b, c, flops_per_s, dram_bytes, mode) for shape, b, c in columns]
    rows = [["", *(setting.name for setting in settings)]]
    base: dict[str, float] = {}
    for contender in contenders():
        cells = []
        for setting in settings:
            seconds = closed_form(setting, contender).step_s
            if contender.num_cards == 0:
                base[setting.name] = seconds
            cells.append(f"{base[setting.name] / seconds:.3f}")
        rows.append([f"{contender.name}, {contender.layout.name}", *cells])
    print_columns(rows)
