"""A picture of the float32 step: nanoseconds per parameter against the number of parameters, with the roof."""

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adam_bench.contenders import OURS, ROOF
from adam_bench.problems import format_count

# times the roof: what is slower leaves the picture, and the legend says how slow it is
_SCALE = 3.0


def plot(curves: Mapping[int, Mapping[str, float]], path: Path, subtitle: str) -> None:
    """Write the picture; contenders that were not run at a size have a gap there.

    Args:
        curves: nanoseconds per parameter by number of parameters and contender.
        path: of the picture; its suffix is the format.
        subtitle: the machine.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    sizes = sorted(curves)
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    names = dict.fromkeys(name for size in sizes for name in curves[size])
    top = _SCALE * max(curve[ROOF] for curve in curves.values())
    for name in names:
        values = [curves[size].get(name, math.nan) for size in sizes]
        slowest = max(value for value in values if not math.isnan(value))
        if name == ROOF:
            axes.plot(sizes, values, color="black", linewidth=3, alpha=0.5, label="roof: the same bytes, moved only")
        else:
            label = name if slowest <= top else f"{name} (up to {slowest:.1f})"
            axes.plot(sizes, values, marker="o", linewidth=2.5 if name == OURS else 1.2, label=label)
    axes.set(xscale="log", xlabel="parameters", ylabel="ns per parameter", xticks=sizes, ylim=(0, top))
    axes.set_xticklabels([format_count(size) for size in sizes])
    axes.minorticks_off()
    figure.suptitle("AdamW step, float32")
    axes.set_title(subtitle, fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
