"""`model_job`: the inventory of a run as a job, with what a step of it moves and computes.

Device memory at the peak, or where the CPU computes, host memory that is not of the roles, is the sum of::

    weights and buffers that stay on the device   all but those that stream
    slots                                         NUM_SLOTS x the largest unit that streams
    activations, logits, loss                     the dry run's peak
    gradients on their way to the host            those of the two largest units or parameters outside of units

It leaves out what a dry run does not see, the driver's and CUDA libraries' own memory (about 0.5 GiB a process) and
what the allocator has cached.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.nn.parameter import is_lazy

from lightning_cxl.inventory.activations import known_parameters
from lightning_cxl.inventory.gradients import leaving_groups, parameter_bytes
from lightning_cxl.inventory.inventory import Inventory
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.jobs.job import Job, MemoryClass
from lightning_cxl.planning.jobs.moves import Traffic, engine_moves, ssd_moves
from lightning_cxl.ssd_options import SSD
from lightning_cxl.streaming.params import NUM_SLOTS
from lightning_cxl.streaming.quantised import numel
from lightning_cxl.streaming.unit_weights import tensors_by_parameter


@dataclass(frozen=True, slots=True)
class ModelJob:
    """A job, and where its device memory comes from."""

    job: Job
    device_parts: Mapping[str, int]
    """Bytes by what they are for; `Job.device_bytes` is their sum."""
    notes: tuple[str, ...]
    """What is assumed or missing, one sentence each."""


def model_job(name: str, inventory: Inventory) -> ModelJob:
    """Return the job of a model that is trained.

    Args:
        name: of the job.
        inventory: of the run.
    """
    workload, run = inventory.workload, inventory.measured.run
    notes = [inventory.measured.note] if inventory.measured.note else []
    parts = _device_parts(inventory)
    if workload.num_devices > 1:
        notes.append(f"planned as data parallel on {workload.num_devices} devices, of which this version drives one")
    n = workload.num_micro_batches
    job = Job(
        name=name,
        classes=_classes(inventory),
        num_parameters=sum(numel(p) for p in known_parameters(inventory.model)),
        num_units=max(1, len(inventory.units)),
        num_records=sum(not record.is_inputs for record in inventory.ssd_records),
        num_visits=len({each.owner for each in inventory.ssd_records if each.is_updated}),
        num_tokens=workload.batch * workload.sequence * n * workload.num_devices,
        forward_flops=run.forward_flops * n,
        backward_flops=run.backward_flops * n,
        overlap=inventory.overlap,
        device_bytes=sum(parts.values()) if run.device_peak_bytes else None,
    )
    return ModelJob(job, parts, tuple(notes))


def _classes(inventory: Inventory) -> tuple[MemoryClass, ...]:
    """Return a class per role and tier that is asked for; each has its part of the role's moves."""
    traffic = _traffic(inventory)
    of_class: dict[tuple[TensorRole, str | None], int] = {}
    of_role: dict[TensorRole, int] = {}
    updated: dict[tuple[TensorRole, str | None], int] = {}
    for each in inventory.tensors:
        of_class[each.role, each.tier] = of_class.get((each.role, each.tier), 0) + each.nbytes
        of_role[each.role] = of_role.get(each.role, 0) + each.nbytes
        updated[each.role, each.tier] = updated.get((each.role, each.tier), 0) + each.is_updated * each.nbytes
    classes = []
    for (role, tier), nbytes in of_class.items():
        part = nbytes / max(1, of_role[role])
        moves = tuple(m._replace(nbytes=m.nbytes * part) for m in engine_moves(role, of_role[role], traffic))
        if tier == SSD:
            on_drives = nbytes * inventory.copies_of(role)
            moves += ssd_moves(role, on_drives, updated[role, tier], traffic.num_micro_batches)
        classes.append(MemoryClass(role=role, nbytes=nbytes * inventory.copies_of(role), tier=tier, moves=moves))
    return tuple(classes)


def _traffic(inventory: Inventory) -> Traffic:
    weight_bytes = inventory.bytes_of(TensorRole.COMPUTE_WEIGHTS)
    parameters = known_parameters(inventory.model)
    trained = sum(p.nbytes for p in parameters if p.requires_grad) / max(1, sum(p.nbytes for p in parameters))
    separate = [each for each in inventory.gradients if each.role is TensorRole.MASTER_GRADS]
    on_host = [each for each in separate if each.unit or inventory.workload.computes_on_host]
    return Traffic(
        num_micro_batches=inventory.workload.num_micro_batches,
        weight_bytes=weight_bytes,
        trained_bytes=round(weight_bytes * trained),
        weights_are_read=not on_host,
        grad_bytes=sum(each.nbytes for each in inventory.gradients),
        arriving_bytes=parameter_bytes(inventory.gradients),
        staged_bytes=inventory.staged_bytes,
        written_back_bytes=parameter_bytes(separate) - parameter_bytes(on_host),
    )


def _device_parts(inventory: Inventory) -> dict[str, int]:
    """Return device memory at the peak by what it is for; see the module's docstring."""
    model, on_host = inventory.model, inventory.workload.computes_on_host
    streamed = inventory.unit_of
    unit_bytes: dict[str, int] = {}
    for each in inventory.tensors:
        if each.unit and each.role is TensorRole.COMPUTE_WEIGHTS:
            unit_bytes[each.unit] = unit_bytes.get(each.unit, 0) + each.nbytes
    buffers = sum(buffer.nbytes for buffer in model.buffers() if not is_lazy(buffer))
    tensors = tensors_by_parameter(model)
    rest = sum(t.nbytes for p in known_parameters(model) if id(p) not in streamed for t in tensors[id(p)])
    leaving = leaving_groups(inventory.gradients)[:2]  # one is copied, one is computed
    parts = {
        "weights that stay on the device": 0 if on_host else rest + buffers,
        f"{NUM_SLOTS} slots for weights that stream": NUM_SLOTS * max(unit_bytes.values(), default=0),
        "activations, logits and loss at their peak": inventory.measured.run.device_peak_bytes,
        "gradients on their way to the host": 0 if on_host else sum(map(parameter_bytes, leaving)),
    }
    return {name: nbytes for name, nbytes in parts.items() if nbytes}
