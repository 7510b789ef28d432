"""What `plan` says about several ranks: what each device and each machine holds and moves, and what bounds the step."""

from collections.abc import Mapping
from typing import Any

from lightning_cxl.commands.plan.findings import Findings
from lightning_cxl.planning.jobs.job import Job
from lightning_cxl.planning.jobs.step import StepTime
from lightning_cxl.tables import table_lines, wrapped
from lightning_cxl.units import format_bytes


def ranks_text(found: Findings) -> list[str]:
    """Return lines about the ranks; none where there is one."""
    mesh, machine = found.planned.mesh, found.machine
    if not mesh.is_sharded:
        return []
    count, machines = mesh.num_devices, mesh.num_machines
    rows = [
        (name, format_bytes(round(per_device)), format_bytes(round(per_device * count)))
        for name, per_device in _per_device(found).items()
        if per_device
    ]
    where = "this machine" if machines == 1 else f"{machines} machines like this one, {count} on each"
    lines = wrapped(f"{mesh.num_ranks} ranks on {where}: {_arrangement(found)}")
    lines += table_lines(("in one step", "each device", f"{count} devices"), rows)
    lines += wrapped(
        f"  host memory: {format_bytes(found.host_bytes)} of each machine, counted once for all of its ranks; "
        f"{format_bytes(found.host_bytes // count)} a rank"
    )
    if machine.links.peer_bytes_per_s is None and count > 1 and not mesh.shares_weights and not machine.device.is_host:
        lines += wrapped(
            "  links between devices are not known: what they exchange is counted as going through host memory. Say "
            "how fast they are under `links` in a machine file (--tiers)"
        )
    if (time := found.chosen.time) is not None:
        lines += wrapped(f"  predicted: {_busy(time)}")
    return lines


def ranks_data(found: Findings) -> dict[str, Any]:
    """Return the same as data for JSON."""
    mesh, volume = found.planned.mesh, found.planned.volume
    time = found.chosen.time
    return {
        "num_devices": mesh.num_devices,
        "num_machines": mesh.num_machines,
        "replicates": mesh.replicates,
        "shares_weights": mesh.shares_weights,
        "device_bytes_per_step": _per_device(found),
        "received_bytes_per_step": volume.total,
        "predicted_busy_seconds": None if time is None else busy_seconds(time),
        "predicted_bound_by": None if time is None else bound_by(time),
    }


def busy_seconds(time: StepTime) -> Mapping[str, float]:
    """Return for how long each resource is busy in a step."""
    total: dict[str, float] = {}
    for phase in time.phases().values():
        for name, seconds in phase.resources.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def bound_by(time: StepTime) -> str:
    """Return the resource that is busy longest in a step."""
    busy = busy_seconds(time)
    return max(busy, key=lambda name: busy[name])


def _per_device(found: Findings) -> dict[str, float]:
    job, volume = found.planned.job, found.planned.volume
    return {
        "copies to the device": _copied(job, "h2d"),
        "copies from the device": _copied(job, "d2h"),
        "all-gather, forward": volume.forward_gather,
        "all-gather, backward": volume.backward_gather,
        "reduce-scatter": volume.reduce_scatter,
        "all-reduce between machines": volume.all_reduce,
    }


def _copied(job: Job, kind: str) -> float:
    return sum(move.nbytes for each in job.classes for move in each.moves if move.kind == kind)


def _arrangement(found: Findings) -> str:
    mesh = found.planned.mesh
    if mesh.shares_weights:
        weights = "devices read weights from one copy in host memory, each over its own link"
    elif mesh.num_shards > 1:
        weights = "each reads its shard of the weights and gathers those of the others"
    else:
        weights = "each has all weights"
    if mesh.num_machines == 1:
        return weights
    between = "every machine holds the whole model" if mesh.replicates else "the model is cut over all machines"
    return f"{between}; {weights}"


def _busy(time: StepTime) -> str:
    busy = ", ".join(f"{name} {each:.2f} s" for name, each in busy_seconds(time).items() if each >= 0.005)
    return f"busy in {time.seconds:.2f} s: {busy}; most of all {bound_by(time)}"
