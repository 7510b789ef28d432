"""A picture of a plan: what lies on which tier and on the device, and where speeds are known, the predicted step."""

import importlib
from pathlib import Path
from typing import Any

from lightning_cxl.commands.plan.findings import Findings
from lightning_cxl.errors import ConfigError
from lightning_cxl.placement.placement import TensorRole
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
    num_tiers = len(found.machine.tiers) + bool(found.planned.job.ssd_bytes)
    widths = [max(6.0, 0.35 * num_tiers * (len(fitting) + 1)), 2.5, 5.0][: 2 if found.dram_only is None else 3]
    figure, (bytes_axes, device_axes, *time_axes) = pyplot.subplots(
        1, len(widths), figsize=(sum(widths), 6), layout="constrained", width_ratios=widths
    )
    _draw_bytes(bytes_axes, found, fitting)
    _draw_device(device_axes, found)
    if found.dram_only is not None:
        _draw_times(time_axes[0], fitting, found.dram_only)
    left_out = [name for name, plan in found.plans.items() if plan.error]
    title = f"{found.model}, {found.settings.batch} x {found.settings.sequence} tokens on {found.machine.name}"
    figure.suptitle(title + (f"; does not fit: {', '.join(left_out)}" if left_out else ""))
    try:
        figure.savefig(path, dpi=110, bbox_inches="tight")
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
    positions, labels = [], []
    # without the line of its capacity, beside which those of memory could not be seen
    on_drives = {SSD: None} if found.planned.job.ssd_bytes else {}
    for group, (tier, capacity_bytes) in enumerate({**capacities, **on_drives}.items()):
        start = group * (len(plans) + 1)
        for index, plan in enumerate(plans):
            bottom = 0.0
            for role in roles:
                size = plan.bytes_on.get(role, {}).get(tier, 0) / _GIB
                label = role.value if group == index == 0 else None
                axes.bar(start + index, size, bottom=bottom, color=_color(role), label=label, width=0.8)
                bottom += size
            positions.append(start + index)
            labels.append(plan.policy)
        axes.annotate(
            tier, (start + (len(plans) - 1) / 2, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom"
        )
        if capacity_bytes is None:
            continue
        capacity = capacity_bytes / _GIB
        axes.hlines(capacity, start - 0.5, start + max(len(plans), 1) - 0.5, colors="black", linestyles="dashed")
        axes.annotate(f"{capacity:.0f} GiB", (start - 0.5, capacity), va="bottom", fontsize="small")
    axes.set_xticks(positions, labels, rotation=90, fontsize="small")
    axes.set_ylabel("GiB on each tier, capacity dashed")
    if plans:
        axes.legend(fontsize="small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25))


def _color(role: TensorRole) -> Any:
    """Return the color of a role, in all pictures the same."""
    return importlib.import_module("matplotlib").colormaps["tab10"].colors[list(TensorRole).index(role)]


def _draw_device(axes: Any, found: Findings) -> None:
    device, bottom = found.machine.device, 0.0
    grays = ("0.25", "0.45", "0.65", "0.8", "0.9")  # no roles: those are on the host
    for gray, (name, nbytes) in zip(grays, found.planned.device_parts.items(), strict=False):
        axes.bar(0, nbytes / _GIB, bottom=bottom, color=gray, label=name, width=0.8)
        bottom += nbytes / _GIB
    if device.memory_bytes and not device.is_host:
        axes.axhline(device.memory_bytes / _GIB, color="black", linestyle="dashed")
    axes.set_xticks([0], ["working memory" if device.is_host else device.name], fontsize="small")
    axes.set(ylabel="GiB at the peak", xlim=(-0.8, 0.8))
    if found.planned.device_parts:
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.08))


def _draw_times(axes: Any, plans: list[PolicyPlan], dram_only: StepTime) -> None:
    times = {plan.policy: plan.time for plan in plans if plan.time is not None}
    times["were DRAM\nlarge enough"] = dram_only
    bottoms = [0.0] * len(times)
    colors = importlib.import_module("matplotlib").colormaps["Set2"].colors  # none of a role
    for color, phase in zip(colors, ("forward", "backward", "update"), strict=False):
        seconds = [getattr(time, phase).seconds for time in times.values()]
        axes.bar(list(times), seconds, bottom=bottoms, label=phase, color=color)
        bottoms = [bottom + more for bottom, more in zip(bottoms, seconds, strict=True)]
    axes.set(ylabel="seconds per step", title="predicted")
    axes.tick_params(axis="x", labelrotation=30, labelsize="small")
    axes.legend(fontsize="small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.25))
