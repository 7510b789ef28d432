"""A picture of a plan: what lies on which tier, and where speeds are known, the predicted step; a bar per policy."""

import importlib
from pathlib import Path
from typing import Any

from lightning_cxl.commands.plan.findings import Findings
from lightning_cxl.errors import ConfigError
from lightning_cxl.planning.compare import PolicyPlan
from lightning_cxl.planning.jobs.step import StepTime
from lightning_cxl.ssd_options import SSD

_GIB = 2**30


def draw(found: Findings, path: Path) -> None:
    """Write the picture; a policy that does not fit has no bars.

    Args:
        found: what to draw.
        path: of the picture; its suffix is the format.

    Raises:
        ConfigError: the file cannot be written.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    fitting = [plan for plan in found.plans.values() if plan.fits]
    if found.dram_only is None:
        figure, bytes_axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    else:
        figure, (bytes_axes, time_axes) = pyplot.subplots(
            1, 2, figsize=(14, 6), layout="constrained", width_ratios=[3, 2]
        )
        _draw_times(time_axes, fitting, found.dram_only)
    _draw_bytes(bytes_axes, found, fitting)
    left_out = [name for name, plan in found.plans.items() if plan.error]
    title = f"{found.model}, {found.settings.batch} x {found.settings.sequence} tokens on {found.machine.name}"
    figure.suptitle(title + (f"; does not fit: {', '.join(left_out)}" if left_out else ""))
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}. Give a file such as plan.png") from error
    finally:
        pyplot.close(figure)


def _draw_bytes(axes: Any, found: Findings, plans: list[PolicyPlan]) -> None:
    capacities = {
        tier.name: tier.capacity_bytes
        for tier in found.machine.tiers
        if tier.backed_by is None or any(p.used_bytes(tier.name) for p in plans)
    }
    roles = list(found.planned.job.bytes_of())
    colors = importlib.import_module("matplotlib").colormaps["tab10"].colors
    positions, labels = [], []
    # without the line of its capacity, beside which those of memory could not be seen
    on_drives = {SSD: None} if found.planned.job.ssd_bytes else {}
    for group, (tier, capacity_bytes) in enumerate({**capacities, **on_drives}.items()):
        start = group * (len(plans) + 1)
        for index, plan in enumerate(plans):
            bottom = 0.0
            for number, role in enumerate(roles):
                size = plan.bytes_on.get(role, {}).get(tier, 0) / _GIB
                label = role.value if group == index == 0 else None
                axes.bar(start + index, size, bottom=bottom, color=colors[number % 10], label=label, width=0.8)
                bottom += size
            positions.append(start + index)
            labels.append(f"{tier}\n{plan.policy}")
        if capacity_bytes is None:
            continue
        capacity = capacity_bytes / _GIB
        axes.hlines(capacity, start - 0.5, start + max(len(plans), 1) - 0.5, colors="black", linestyles="dashed")
        axes.annotate(f"{tier}: {capacity:.0f} GiB", (start - 0.5, capacity), va="bottom", fontsize="small")
    axes.set_xticks(positions, labels, rotation=60, fontsize="small")
    axes.set(ylabel="GiB", title="bytes per tier, capacity dashed")
    if plans:
        axes.legend(fontsize="small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25))


def _draw_times(axes: Any, plans: list[PolicyPlan], dram_only: StepTime) -> None:
    times = {plan.policy: plan.time for plan in plans if plan.time is not None}
    times["were DRAM\nlarge enough"] = dram_only
    bottoms = [0.0] * len(times)
    for phase in ("forward", "backward", "update"):
        seconds = [getattr(time, phase).seconds for time in times.values()]
        axes.bar(list(times), seconds, bottom=bottoms, label=phase)
        bottoms = [bottom + more for bottom, more in zip(bottoms, seconds, strict=True)]
    axes.set(ylabel="seconds per step", title="predicted")
    axes.tick_params(axis="x", labelrotation=30, labelsize="small")
    axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.25))
