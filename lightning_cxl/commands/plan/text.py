"""The findings of `plan` as text that fits on one screen."""

from collections.abc import Mapping

from lightning_cxl.commands.plan.advice import Way
from lightning_cxl.commands.plan.findings import Findings
from lightning_cxl.commands.plan.ranks import ranks_text
from lightning_cxl.commands.plan.settings import Settings
from lightning_cxl.machine.machine import Device, Machine
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.compare import PolicyPlan, fits_device, working_bytes
from lightning_cxl.planning.jobs.job import Job
from lightning_cxl.planning.jobs.step import StepTime
from lightning_cxl.ssd_options import SSD
from lightning_cxl.tables import table_lines, wrapped
from lightning_cxl.units import format_bytes

_NO_SPEEDS = (
    "predicted seconds are not known: measure this machine's speeds with `python -m lightning_cxl calibrate` first"
)


def as_text(found: Findings) -> str:
    """Return the findings as text; sentences are wrapped at the terminal's width."""
    blocks = [_head(found), _roles(found), _ssd(found), _device(found), ranks_text(found)]
    blocks += [_policies(found), _verdict(found)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _head(found: Findings) -> list[str]:
    job, machine, chosen = found.planned.job, found.machine, found.settings
    steps = "" if chosen.accumulate_grad_batches == 1 else f" x {chosen.accumulate_grad_batches} micro-batches"
    devices = "" if machine.device.count == 1 else f" x {machine.device.count} devices"
    devices += "" if chosen.num_nodes == 1 else f" x {chosen.num_nodes} machines"
    tiers = ", ".join(f"{tier.name} {format_bytes(tier.capacity_bytes)}" for tier in machine.tiers)
    flops = f", {machine.device.flops / 1e12:.3g} TFLOP/s in training" if machine.has_speeds else ""
    return [
        *wrapped(
            f"Plan: {found.model}, {job.num_parameters:,} parameters in {job.num_units} units; {_adapters(chosen)}"
            f"{chosen.precision}, {chosen.state} state, {chosen.master} masters; "
            f"{chosen.batch} x {chosen.sequence} tokens{steps}{devices}"
        ),
        *wrapped(
            f"Machine: {machine.name}: {tiers}{_together(machine)}{_drives(machine)}; {machine.device.name}{flops}"
        ),
        *(wrapped(f"  speeds: {machine.source}") if machine.source else []),
    ]


def _adapters(chosen: Settings) -> str:
    if chosen.lora is None:
        return ""
    below = "frozen" if chosen.quantize is None else chosen.quantize.replace("bit", "-bit")
    return f"adapters of rank {chosen.lora} on {below} weights, "


def _drives(machine: Machine) -> str:
    """Return the tier `ssd`, where there is one."""
    ssd = machine.ssd
    if ssd is None:
        return ""
    drives = f" on {ssd.num_drives} drives" if ssd.num_drives > 1 else ""
    text = f"; ssd {format_bytes(ssd.capacity_bytes)}{drives}"
    if ssd.read_bytes_per_s is None or ssd.write_bytes_per_s is None:
        return text
    return f"{text}, {ssd.read_bytes_per_s / 1e9:.2f} GB/s read, {ssd.write_bytes_per_s / 1e9:.2f} GB/s written"


def _together(machine: Machine) -> str:
    """Return what all tiers hold together, where that is less than the sum."""
    if machine.host_bytes is None or machine.host_bytes >= sum(tier.capacity_bytes for tier in machine.tiers):
        return ""
    return f", {format_bytes(machine.host_bytes)} together"


def _roles(found: Findings) -> list[str]:
    plan = found.chosen
    tiers = _tiers(found) if plan.bytes_on else ()
    roles = found.planned.job.bytes_of()
    rows = []
    for role, nbytes in roles.items():
        on = plan.bytes_on.get(role, {})
        rows.append((role.value, format_bytes(nbytes), *(format_bytes(on[t]) if on.get(t) else "-" for t in tiers)))
    used = [format_bytes(plan.used_bytes(name)) for name in tiers]
    rows.append(("in all", format_bytes(sum(roles.values())), *used))
    lines = table_lines((f"policy {plan.policy}", "bytes", *tiers), rows)
    roles_of: dict[str, list[str]] = {}
    for role, reason in plan.reasons.items():
        roles_of.setdefault(reason, []).append(role.value)
    for reason, names in roles_of.items():
        lines += wrapped(f"  {', '.join(names)}: {reason}")
    if found.machine.device.is_host and found.planned.job.device_bytes:
        working = format_bytes(working_bytes(found.planned.job, found.machine))
        lines.append(f"host memory in all: {format_bytes(found.host_bytes)}, with {working} that the CPU works in")
    return lines


def _tiers(found: Findings) -> tuple[str, ...]:
    """Return the tiers that have a column: those of memory, and `ssd` where anything lies there."""
    return (*found.machine.names, SSD) if found.planned.job.ssd_bytes else found.machine.names


def _ssd(found: Findings) -> list[str]:
    """Return what memory cannot hold, what the drives do for it, and what is left of memory."""
    job, machine = found.planned.job, found.machine
    if machine.ssd is None or not job.ssd_written_bytes:
        return []
    left = max(0, machine.memory_bytes - found.host_bytes)
    twice = ", optimizer state in two versions" if machine.ssd.versions > 1 else ""
    used = format_bytes(job.ssd_bytes_in(machine.ssd.versions))
    lines = wrapped(
        f"tier ssd: memory cannot hold {_on_drives(job)}, "
        f"{used} of {format_bytes(machine.ssd.capacity_bytes)}{twice}; "
        f"memory left over: {format_bytes(left)} of {format_bytes(machine.memory_bytes)}"
    )
    if found.chosen.time is not None:
        busy = dict.fromkeys(("ssd read", "ssd write"), 0.0)
        for phase in found.chosen.time.phases().values():
            busy = {name: seconds + phase.resources.get(name, 0.0) for name, seconds in busy.items()}
        lines += wrapped(
            f"  a step reads for {busy['ssd read']:.2f} s and writes for {busy['ssd write']:.2f} s, at the same time; "
            f"that adds {found.chosen.ssd_seconds or 0.0:.2f} s to the {found.chosen.time.seconds:.2f} s predicted"
        )
    elif machine.has_speeds and not machine.ssd.has_speeds:
        lines += wrapped(
            "  the speeds of its drives are not known, so no seconds are predicted: `python -m lightning_cxl calibrate "
            "--ssd DIR` measures them"
        )
    return [*lines, f"  {job.ssd_written_bytes / 1e9:.3g} GB written per step"]


def _on_drives(job: Job) -> str:
    """Return what lies there."""
    has_weights = any(each.role is TensorRole.COMPUTE_WEIGHTS and each.tier == SSD for each in job.classes)
    what = "optimizer state and weights" if has_weights else "optimizer state"
    inputs = sum(each.nbytes for each in job.classes if each.tier == SSD and each.role is TensorRole.ACTIVATIONS)
    parts = [f"{what} in {job.num_records} records"] if job.num_records else []
    parts += [f"{format_bytes(inputs)} of activations"] if inputs else []
    return " and ".join(parts)


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
    return [text, *wrapped(f"  {parts}")]


def _policies(found: Findings) -> list[str]:
    """Return a row per policy: its predicted times, or where speeds are not known, what it puts where.

    On one tier all policies do the same: only the chosen one is shown.
    """
    plans = found.plans if len(found.machine.tiers) > 1 else {found.policy: found.chosen}
    lines: list[str] = []
    if found.dram_only is not None:
        lines = _times(found, plans, found.dram_only)
    elif len(plans) > 1:
        lines = _placed(found)
    for name, plan in plans.items():
        lines += wrapped(f"{name} does not fit: {plan.error}") if plan.error else []
    if found.dram_only is None:
        lines += wrapped(_NO_SPEEDS)
    elif found.chosen.time:
        lines += wrapped(f"predicted, {found.policy}: {found.chosen.time.describe()}")
    return lines


def _times(found: Findings, plans: Mapping[str, PolicyPlan], dram_only: StepTime) -> list[str]:
    tokens = found.planned.job.num_tokens

    def row(name: str, time: StepTime | None) -> tuple[str, ...]:
        if time is None:
            return (name, *["-"] * 6)
        phases = (f"{each.seconds:.3f}" for each in time.phases().values())
        relative = f"{dram_only.seconds / time.seconds:.1%}"
        return (name, *phases, f"{time.seconds:.3f}", f"{tokens / time.seconds:,.0f}", relative)

    rows = [row(name, plan.time) for name, plan in plans.items()]
    rows.append(row("were DRAM large enough", dram_only))
    phases = (f"{name} s" for name in dram_only.phases())
    return table_lines(("predicted", *phases, "step s", "tokens/s", "of DRAM only"), rows)


def _placed(found: Findings) -> list[str]:
    tiers = found.machine.names
    rows = []
    for name, plan in found.plans.items():
        used = [format_bytes(plan.used_bytes(tier)) if plan.fits else "-" for tier in tiers]
        rows.append((name, *used, "needs speeds" if plan.needs_speeds else "not known" if plan.fits else "-"))
    return table_lines(("policy", *tiers, "predicted"), rows)


def _verdict(found: Findings) -> list[str]:
    device = found.machine.device
    notes = list(found.planned.notes)
    if found.settings.precision == "32-true" and found.machine.has_speeds:
        notes.append("the device's flops are those of bfloat16 products: float32 computes longer than predicted")
    if found.fits:
        known = device.is_host or (found.planned.job.device_bytes is not None and device.memory_bytes)
        lines = ["It fits." if known else f"It fits the host; whether it fits {device.name} is not known."]
    else:
        where = [] if not found.chosen.error else [f"host memory (policy {found.policy})"]
        where += [] if fits_device(found.planned.job, found.machine) else [f"{device.name}'s memory"]
        lines = [f"It does not fit {' nor '.join(where)}."]
        lines += (
            ["What would make it fit, each way on its own:"]
            if found.ways
            else ["Nothing that was tried makes it fit: use a smaller model."]
        )
        for way in found.ways:
            lines += wrapped(f"  {way.text}: {_taken(way, device)}")
            lines += [f"    {command}"] if (command := way.command(found.command)) else []
    return lines + [line for note in notes for line in wrapped(f"note: {note}")]


def _taken(way: Way, device: Device) -> str:
    if device.is_host or way.device_bytes is None:
        return f"{format_bytes(way.host_bytes)} of host memory"
    return f"{format_bytes(way.host_bytes)} of host memory, {format_bytes(way.device_bytes)} of {device.name}"
