"""Planned and measured bytes per tier and role: the dict behind `strategy.report()` and its one-screen text."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_cxl.ssd_options import SSD
from lightning_cxl.tables import table_lines
from lightning_cxl.units import format_bytes

_WIDTH = 110
_MAX_REASONS = 8


def format_report(report: Mapping[str, Any]) -> str:
    """Return the report as text of at most about forty lines of at most 110 columns."""
    lines = [f"CXL offload on {report['device']}, {report['state']}"]
    if (ranks := report.get("ranks")) is not None:
        lines[0] += ", rank {rank} of {num_ranks}, local rank {local_rank} of {num_local_ranks}".format_map(ranks)
        lines.append(
            "bytes are of this rank; capacities of memory are of the machine, and parameters of the whole model"
        )
    lines += table_lines(
        ("tier", "capacity", "budget", "used", "peak"),
        [
            (name, *(_size(tier[key]) for key in ("capacity_bytes", "budget_bytes", "used_bytes", "peak_bytes")))
            for name, tier in report["tiers"].items()
        ],
    )
    rows = []
    for role in dict.fromkeys([*report["planned_roles"], *report["peak_roles"]]):
        tiers = dict.fromkeys([*report["planned_roles"].get(role, {}), *report["peak_roles"].get(role, {})])
        rows += [
            (
                role,
                tier,
                _size(report["planned_roles"].get(role, {}).get(tier)),
                *(_size(report[key].get(role, {}).get(tier, _unused(tier))) for key in ("roles", "peak_roles")),
            )
            for tier in tiers
        ]
    if rows:
        lines += ["", *table_lines(("role", "tier", "planned", "used", "peak"), rows, left=2), _total(report)]
    lines += ["", f"policy: {report['policy']}", *_reasons(report["reasons"])]
    lines.append(f"parameters: {report['num_parameters']:,} ({report['num_trainable']:,} trained)")
    lines.append(f"units: {_units(report['units'])}")
    if streamed := report["streamed"]:
        lines.append(
            f"streamed weights: {_size(streamed['host_bytes'])} of {streamed['num_units']} units through "
            f"{_size(streamed['slot_bytes'])} on the device, {streamed['num_fetches']} copies, "
            f"{streamed['num_late']} not fetched ahead"
        )
    if moved := report["ssd"]:
        seconds = f" of {moved['step_seconds']:.2f} s" if moved["step_seconds"] else ""
        read, written = (f"{moved[f'{way}_bytes_per_step'] / 1e9:.3g} GB {way}" for way in ("read", "written"))
        lines.append(f"tier ssd, {moved['num_steps']:,.0f} steps{seconds}: {read} and {written} per step")
    lines += [f"optimizer: {text}" for text in report["optimizers"]]
    lines += [f"note: {text}" for text in report["notes"]]
    return "\n".join(lines)


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report of all runs on one host: what it has counted itself is in each of theirs, the rest is added.

    Args:
        reports: of at least one run.
    """
    trains = [report for report in reports if report["optimizers"]]
    result = dict((trains or list(reports))[-1])  # what is on the tier `ssd` is of a run that trains
    for key in ("num_parameters", "num_trainable"):
        result[key] = sum(report[key] for report in reports)
    for key in ("units", "optimizers", "notes"):
        result[key] = list(dict.fromkeys(text for report in reports for text in report[key]))
    result["streamed"] = _sums([report["streamed"] for report in reports])
    for key, add in (("planned_roles", _sums), ("reasons", _lists)):
        roles = dict.fromkeys(role for report in reports for role in report[key])
        result[key] = {role: add([report[key][role] for report in reports if role in report[key]]) for role in roles}
    return result


def _sums(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    keys = dict.fromkeys(key for each in counts for key in each)
    return {key: sum(each.get(key, 0) for each in counts) for key in keys}


def _lists(reasons: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(text for each in reasons for text in each))


def _unused(tier: str) -> int | None:
    """Return what is shown where no memory is counted: on the tier `ssd` roles are not counted one by one."""
    return None if tier == SSD else 0


def _total(report: Mapping[str, Any]) -> str:
    """Return the line that compares the plan with what was measured, of memory."""
    planned, peak = (
        sum(nbytes for tiers in report[key].values() for tier, nbytes in tiers.items() if tier != SSD)
        for key in ("planned_roles", "peak_roles")
    )
    of_plan = f" ({peak / planned:.0%})".replace("%", " %") if planned else ""
    return f"in all, each role at its peak: planned {format_bytes(planned)}, peak {format_bytes(peak)}{of_plan}"


def _reasons(reasons: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line per role that says where it goes and why."""
    lines = []
    for role, all_of_role in list(reasons.items())[:_MAX_REASONS]:
        more = f" (and {len(all_of_role) - 1} more)" if len(all_of_role) > 1 else ""
        lines.append(textwrap.shorten(f"{role}: {all_of_role[0]}", _WIDTH - 2 - len(more), placeholder=" ...") + more)
    return [f"  {line}" for line in lines]


def _units(names: list[str]) -> str:
    if not names:
        return "none (activations stay where the model puts them)"
    if len(names) == 1:
        return names[0]
    return f"{len(names)} blocks, {names[0]} to {names[-1]}, inputs kept on the activation tier, recomputed in backward"


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)
