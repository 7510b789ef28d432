"""A plan as text that fits on one screen, and as data for JSON."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_cxl.commands.plan.study import Change, Settings
from lightning_cxl.machine.machine import Device, Machine
from lightning_cxl.planning.compare import PolicyPlan, fits_device
from lightning_cxl.planning.jobs.model_job import ModelJob
from lightning_cxl.planning.jobs.step import StepTime
from lightning_cxl.units import format_bytes

_PHASES = ("forward", "backward", "update")
_WIDTH = 118
_NO_SPEEDS = (
    "predicted seconds are not known: measure this machine's speeds with `python -m lightning_cxl calibrate` first"
)


@dataclass(frozen=True, slots=True)
class Findings:
    """All that the command found out."""

    model: str
    settings: Settings
    machine: Machine
    planned: ModelJob
    policy: str
    """The one that is shown in full."""
    plans: Mapping[str, PolicyPlan]
    dram_only: StepTime | None
    """Predicted as if DRAM were large enough; None where speeds are not known."""
    changes: Sequence[Change]
    """What would make it fit, where it does not."""

    @property
    def chosen(self) -> PolicyPlan:
        """The plan of the policy that is shown in full."""
        return self.plans[self.policy]

    @property
    def fits(self) -> bool:
        """Whether host and device can hold the job."""
        return self.chosen.fits and fits_device(self.planned.job, self.machine)

    @property
    def host_bytes(self) -> int:
        """Host memory in all: every role, and where the CPU computes, what it works in."""
        job = self.planned.job
        return sum(job.bytes_of().values()) + (job.device_bytes or 0 if self.machine.device.is_host else 0)


def as_data(found: Findings) -> dict[str, Any]:
    """Return the findings as JSON-able data; seconds and tokens per second are predicted."""
    job, machine = found.planned.job, found.machine
    return {
        "model": found.model,
        "settings": asdict(found.settings),
        "machine": {
            "name": machine.name,
            "source": machine.source,
            "tiers": {
                tier.name: {"kind": tier.kind.value, "capacity_bytes": tier.capacity_bytes} for tier in machine.tiers
            },
            "has_speeds": machine.has_speeds,
            "device": asdict(machine.device) if machine.has_speeds else _without_speeds(machine.device),
        },
        "num_parameters": job.num_parameters,
        "num_units": job.num_units,
        "num_tokens": job.num_tokens,
        "overlap": job.overlap,
        "roles": {role.value: nbytes for role, nbytes in job.bytes_of().items()},
        "host_bytes": found.host_bytes,
        "device_bytes": job.device_bytes,
        "device_parts": dict(found.planned.device_parts),
        "policy": found.policy,
        "fits": found.fits,
        "fits_device": fits_device(job, machine),
        "what_fits": [change.text for change in found.changes],
        "predicted_dram_only_seconds": found.dram_only.seconds if found.dram_only else None,
        "policies": {name: _policy_data(each, found) for name, each in found.plans.items()},
        "notes": list(found.planned.notes),
    }


def _without_speeds(device: Device) -> dict[str, Any]:
    """Return a device's data with nothing in the place of placeholders."""
    return {name: None if name.endswith("_per_s") or name == "flops" else v for name, v in asdict(device).items()}


def _policy_data(plan: PolicyPlan, found: Findings) -> dict[str, Any]:
    data: dict[str, Any] = {
        "fits": None if plan.needs_speeds else plan.fits,
        "needs_speeds": plan.needs_speeds,
        "error": plan.error,
        "bytes": {role.value: dict(tiers) for role, tiers in plan.bytes_on.items()},
        "reasons": {role.value: reason for role, reason in plan.reasons.items()},
        "predicted": None,
    }
    if plan.time is not None and found.dram_only is not None:
        data["predicted"] = {
            "seconds": plan.time.seconds,
            "tokens_per_s": found.planned.job.num_tokens / plan.time.seconds,
            "of_dram_only": found.dram_only.seconds / plan.time.seconds,
            "hidden_seconds": plan.time.hidden_seconds,
            "phases": {
                name: {"seconds": each.seconds, "bound_by": each.bound_by, "busy_seconds": dict(each.resources)}
                for name, each in plan.time.phases().items()
            },
        }
    return data


def as_text(found: Findings) -> str:
    """Return the findings as text of at most `_WIDTH` columns."""
    blocks = [_head(found), _roles(found), _device(found), _times(found), _verdict(found)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _head(found: Findings) -> list[str]:
    job, machine, chosen = found.planned.job, found.machine, found.settings
    how = f"{chosen.precision}, {chosen.state} state, {chosen.master} masters"
    steps = "" if chosen.accumulate_grad_batches == 1 else f" x {chosen.accumulate_grad_batches} micro-batches"
    devices = "" if machine.device.count == 1 else f" x {machine.device.count} devices"
    tiers = ", ".join(f"{tier.name} {format_bytes(tier.capacity_bytes)}" for tier in machine.tiers)
    lines = [
        f"Plan: {found.model}, {job.num_parameters:,} parameters in {job.num_units} units; {how}; "
        f"{chosen.batch} x {chosen.sequence} tokens{steps}{devices}",
        f"Machine: {machine.name}: {tiers}{_together(machine)}; {machine.device.name}"
        + (f", {machine.device.flops / 1e12:.3g} TFLOP/s in training" if machine.has_speeds else ""),
    ]
    wrapped = [line for text in lines for line in _wrap(text)]
    return [*wrapped, *(_wrap(f"  speeds: {machine.source}") if machine.source else [])]


def _together(machine: Machine) -> str:
    """Return what all tiers hold together, where that is less than the sum."""
    if machine.host_bytes is None or machine.host_bytes >= sum(tier.capacity_bytes for tier in machine.tiers):
        return ""
    return f", {format_bytes(machine.host_bytes)} together"


def _roles(found: Findings) -> list[str]:
    plan, tiers = found.chosen, found.machine.names
    rows = [(f"policy {plan.policy}", "bytes", *tiers)]
    for role, nbytes in found.planned.job.bytes_of().items():
        on = plan.bytes_on.get(role, {})
        cells = [format_bytes(on[name]) if on.get(name) else "-" for name in tiers]
        rows.append((role.value, format_bytes(nbytes), *cells))
    total = sum(found.planned.job.bytes_of().values())
    used = [format_bytes(plan.used_bytes(name)) for name in tiers]
    rows.append(("in all", format_bytes(total), *(used if plan.bytes_on else ["-"] * len(tiers))))
    lines = _table(rows, left=(0,))
    roles_of: dict[str, list[str]] = {}
    for role, reason in plan.reasons.items():
        roles_of.setdefault(reason, []).append(role.value)
    for reason, roles in roles_of.items():
        lines += _wrap(f"  {', '.join(roles)}: {reason}")
    if found.machine.device.is_host and found.planned.job.device_bytes:
        working = format_bytes(found.planned.job.device_bytes)
        lines.append(f"host memory in all: {format_bytes(found.host_bytes)}, with {working} that the CPU works in")
    return lines


def _device(found: Findings) -> list[str]:
    job, device = found.planned.job, found.machine.device
    if job.device_bytes is None:
        return []
    where = "the CPU's working memory" if device.is_host else f"{device.name} at its peak"
    text = f"{where}: {format_bytes(job.device_bytes)}"
    if device.memory_bytes and not device.is_host:
        verdict = "fits" if fits_device(job, found.machine) else "DOES NOT FIT"
        text += f" of {format_bytes(device.memory_bytes)}: {verdict}"
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in found.planned.device_parts.items())
    return [text, *_wrap(f"  {parts}")]


def _times(found: Findings) -> list[str]:
    if found.dram_only is None:
        return _placed(found)
    tokens = found.planned.job.num_tokens
    rows = [("predicted", *(f"{name} s" for name in _PHASES), "step s", "tokens/s", "of DRAM only")]
    for name, plan in found.plans.items():
        if plan.time is None:
            rows.append((name, *["-"] * 6))
        else:
            rows.append((name, *_cells(plan.time, tokens), f"{found.dram_only.seconds / plan.time.seconds:.1%}"))
    rows.append(("were DRAM large enough", *_cells(found.dram_only, tokens), "100.0%"))
    lines = _table(rows, left=(0,))
    for name, plan in found.plans.items():
        lines += _wrap(f"{name} does not fit: {plan.error}") if plan.error else []
    return lines + (_wrap(f"predicted, {found.policy}: {found.chosen.time.describe()}") if found.chosen.time else [])


def _placed(found: Findings) -> list[str]:
    """Return what each policy puts where, for machines without speeds."""
    tiers = found.machine.names
    rows = [("policy", *tiers, "predicted")]
    for name, plan in found.plans.items():
        used = [format_bytes(plan.used_bytes(tier)) if plan.fits else "-" for tier in tiers]
        rows.append((name, *used, "needs speeds" if plan.needs_speeds else "not known" if plan.fits else "-"))
    lines = _table(rows, left=(0,))
    for name, plan in found.plans.items():
        lines += _wrap(f"{name} does not fit: {plan.error}") if plan.error else []
    return [*lines, *_wrap(_NO_SPEEDS)]


def _cells(time: StepTime, tokens: int) -> list[str]:
    return [
        *(f"{each.seconds:.3f}" for each in time.phases().values()),
        f"{time.seconds:.3f}",
        f"{tokens / time.seconds:,.0f}",
    ]


def _verdict(found: Findings) -> list[str]:
    texts = list(found.planned.notes)
    if found.settings.precision == "32-true" and found.machine.has_speeds:
        texts.append("the device's flops are those of bfloat16 products: float32 computes longer than predicted")
    notes = [line for text in texts for line in _wrap(f"note: {text}")]
    if found.fits:
        device = found.machine.device
        known = device.is_host or (found.planned.job.device_bytes is not None and device.memory_bytes)
        text = "It fits." if known else f"It fits the host; whether it fits {device.name} is not known."
        return [text, *notes]
    where = [] if not found.chosen.error else [f"host memory (policy {found.policy})"]
    where += [] if fits_device(found.planned.job, found.machine) else [f"{found.machine.device.name}'s memory"]
    lines = [f"It does not fit {' nor '.join(where)}."]
    if found.changes:
        return [
            *lines,
            "What would make it fit, each on its own:",
            *(f"  {each.text}" for each in found.changes),
            *notes,
        ]
    return [*lines, "No two of the changes that can be tried here make it fit: use a smaller model.", *notes]


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="    ")


def _table(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
