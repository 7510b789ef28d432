"""Timelines: who was busy when, as a picture."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulation.engine import HOST_LANE
from simulation.trace import Trace

from schedule.model import LANE

LANES = (LANE, "h2d", "d2h", HOST_LANE)
_COLOURS = {
    "forward": "#4c72b0",
    "backward": "#dd8452",
    "weights": "#55a868",
    "activations": "#8172b3",
    "gradients": "#c44e52",
    "update": "#937860",
}
_WHAT = {"compute_weights": "weights", "staging": "gradients", "compute_grads": "gradients"}


def draw(traces: Mapping[str, Trace], path: Path) -> None:
    """Write one timeline per trace.

    Args:
        traces: of one step each, by title.
        path: of the picture; its suffix is the format.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, panels = pyplot.subplots(
        len(traces), figsize=(14, 2.4 * len(traces) + 0.6), squeeze=False, layout="constrained"
    )
    used = set()
    for axes, (title, trace) in zip(panels[:, 0], traces.items(), strict=True):
        start_s = min(interval.start_s for interval in trace.intervals)
        for row, lane in enumerate(LANES):
            for interval in trace.lane(lane):
                what = _what(lane, interval.name)
                used.add(what)
                left_ms, width_ms = (interval.start_s - start_s) * 1e3, (interval.end_s - interval.start_s) * 1e3
                axes.broken_barh([(left_ms, width_ms)], (row - 0.4, 0.8), color=_COLOURS[what], edgecolor="white")
        axes.set(yticks=range(len(LANES)), yticklabels=LANES, title=title)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
    panels[-1, 0].set_xlabel("ms")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour, label=what) for what, colour in _COLOURS.items()]
    figure.legend(handles=[each for each in handles if each.get_label() in used], loc="outside right upper")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _what(lane: str, name: str) -> str:
    if lane == HOST_LANE:
        return "update"
    last = name.rsplit(" ", 1)[-1]
    return _WHAT.get(last, last)
