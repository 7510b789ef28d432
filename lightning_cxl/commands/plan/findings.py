"""`Findings`: all that `plan` found out, and the same as data for JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_cxl.commands.plan.advice import Way
from lightning_cxl.commands.plan.settings import Settings
from lightning_cxl.machine.machine import Device, Machine
from lightning_cxl.planning.compare import PolicyPlan, fits_device, working_bytes
from lightning_cxl.planning.jobs.model_job import ModelJob
from lightning_cxl.planning.jobs.step import StepTime


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
    ways: Sequence[Way]
    """What would make it fit, where it does not."""
    command: str = ""
    """What was typed; "" where nothing was."""

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
        """Host memory in all: every role, and where the CPU computes, what it works in; not what the tier `ssd` has."""
        job = self.planned.job
        return sum(job.bytes_of().values()) - job.ssd_bytes + working_bytes(job, self.machine)


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
        "host_bytes_left": machine.memory_bytes - found.host_bytes,
        "ssd": _ssd_data(found),
        "device_bytes": job.device_bytes,
        "device_parts": dict(found.planned.device_parts),
        "policy": found.policy,
        "fits": found.fits,
        "fits_device": fits_device(job, machine),
        "what_fits": [
            {
                "text": way.text,
                "command": way.command(found.command),
                "host_bytes": way.host_bytes,
                "device_bytes": way.device_bytes,
            }
            for way in found.ways
        ],
        "predicted_dram_only_seconds": found.dram_only.seconds if found.dram_only else None,
        "policies": {name: _policy_data(each, found) for name, each in found.plans.items()},
        "notes": list(found.planned.notes),
    }


def _ssd_data(found: Findings) -> dict[str, Any] | None:
    job, ssd = found.planned.job, found.machine.ssd
    if ssd is None:
        return None
    return {
        **asdict(ssd),
        "used_bytes": job.ssd_bytes_in(ssd.versions),
        "num_records": job.num_records,
        "read_bytes_per_step": job.ssd_read_bytes,
        "written_bytes_per_step": job.ssd_written_bytes,
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
            "ssd_seconds": plan.ssd_seconds,
            "phases": {
                name: {"seconds": each.seconds, "bound_by": each.bound_by, "busy_seconds": dict(each.resources)}
                for name, each in plan.time.phases().items()
            },
        }
    return data
