"""`model_job`: the inventory of a run as a job, with what a step of it moves and computes.

Device memory at the peak, or where the CPU computes, host memory that is not of the roles, is the sum of::

    weights and buffers that stay on the device   all but those that stream
    slots                                         NUM_SLOTS x the largest unit that streams
    activations, logits, loss                     the dry run's peak
    gradients on their way to the host            those of the two largest units or parameters outside of units

Of several ranks, each gathers a unit in the place of a slot, reduces a unit's gradients before its shard of them
leaves, and has a unit's shard on the device besides. What a job has in host memory and copies is that of one machine.

It leaves out what a dry run does not see, the driver's and CUDA libraries' own memory (about 0.5 GiB a process) and
what the allocator has cached.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch.nn.parameter import is_lazy

from lightning_cxl.inventory.activations import known_parameters
from lightning_cxl.inventory.gradients import leaving_groups, parameter_bytes
from lightning_cxl.inventory.inventory import Inventory
from lightning_cxl.inventory.mesh import Mesh
from lightning_cxl.inventory.tensors import GRADIENTS
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.jobs.collectives import Group, Volume, groups_of, step_volume
from lightning_cxl.planning.jobs.exchange import exchanges
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
    mesh: Mesh = field(default_factory=Mesh)
    volume: Volume = field(default_factory=Volume)
    """What every rank receives from others in one step."""


def model_job(name: str, inventory: Inventory) -> ModelJob:
    """Return the job of a model that is trained.

    Args:
        name: of the job.
        inventory: of the run.
    """
    workload, run = inventory.workload, inventory.measured.run
    notes = [inventory.measured.note] if inventory.measured.note else []
    parts, mesh = _device_parts(inventory), workload.mesh
    n = workload.num_micro_batches
    groups = groups_of(inventory.model, inventory.units, mesh)
    volume = step_volume(groups, mesh, n, no_sync=workload.no_sync)
    job = Job(
        name=name,
        classes=_classes(inventory),
        num_parameters=sum(numel(p) for p in known_parameters(inventory.model)),
        num_units=max(1, len(inventory.units)),
        num_records=sum(not record.is_inputs for record in inventory.ssd_records),
        num_visits=len({each.owner for each in inventory.ssd_records if each.is_updated}),
        num_tokens=workload.batch * workload.sequence * n * mesh.num_ranks,
        forward_flops=run.forward_flops * n,
        backward_flops=run.backward_flops * n,
        overlap=inventory.overlap,
        device_bytes=sum(parts.values()) if run.device_peak_bytes else None,
        exchanges=exchanges(volume, mesh, len(groups), n, workload.num_arrivals),
        shares_weights=mesh.shares_weights and mesh.is_sharded,
    )
    return ModelJob(job, parts, tuple(notes), mesh, volume)


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
        of_all = engine_moves(role, of_role[role], _of_role(role, traffic, inventory))
        moves = tuple(move._replace(nbytes=move.nbytes * part) for move in of_all)
        if tier == SSD:
            on_drives = nbytes * inventory.copies_of(role)
            moves += ssd_moves(role, on_drives, updated[role, tier], traffic.num_micro_batches)
        classes.append(MemoryClass(role=role, nbytes=nbytes * inventory.copies_of(role), tier=tier, moves=moves))
    return tuple(classes)


def _of_role(role: TensorRole, traffic: Traffic, inventory: Inventory) -> Traffic:
    """Return the traffic of one role: some gradients may be compute gradients, and others master gradients."""
    if role not in GRADIENTS:
        return traffic
    own = [each for each in inventory.gradients if each.role is role]
    part = parameter_bytes(own) / max(1, parameter_bytes(inventory.gradients))
    return replace(
        traffic,
        grad_bytes=sum(each.nbytes for each in own),
        arriving_bytes=round(part * traffic.arriving_bytes),
        staged_bytes=round(part * traffic.staged_bytes),
    )


def _traffic(inventory: Inventory) -> Traffic:
    weight_bytes = inventory.bytes_of(TensorRole.COMPUTE_WEIGHTS)
    parameters = known_parameters(inventory.model)
    trained = sum(p.nbytes for p in parameters if p.requires_grad) / max(1, sum(p.nbytes for p in parameters))
    separate = [each for each in inventory.gradients if each.role is TensorRole.MASTER_GRADS]
    mesh = inventory.workload.mesh
    all_on_host = inventory.workload.computes_on_host or mesh.is_sharded
    on_host = [each for each in separate if each.unit or all_on_host]
    arriving = [each.parameter for each in inventory.gradients if each.parameter is not None]
    return Traffic(
        num_micro_batches=inventory.workload.num_micro_batches,
        num_arrivals=inventory.workload.num_arrivals,
        weight_bytes=weight_bytes,
        trained_bytes=round(weight_bytes * trained),
        weights_are_read=not on_host,
        grad_bytes=sum(each.nbytes for each in inventory.gradients),
        arriving_bytes=mesh.machine_bytes(parameter_bytes(inventory.gradients), arriving),
        staged_bytes=inventory.staged_bytes,
        written_back_bytes=parameter_bytes(separate) - parameter_bytes(on_host),
        root_bytes=_root_bytes(inventory),
        weight_parts=1 if mesh.shares_weights else mesh.num_devices,
        gradient_parts=mesh.num_devices,
    )


def _root_bytes(inventory: Inventory) -> int:
    """Return the weights on the host that a device reads once in forward and backward; see `Traffic`."""
    if inventory.workload.computes_on_host or not inventory.workload.mesh.is_sharded:
        return 0
    weights = (each for each in inventory.tensors if each.role is TensorRole.COMPUTE_WEIGHTS)
    return sum(each.nbytes for each in weights if not each.unit)


def _device_parts(inventory: Inventory) -> dict[str, int]:
    """Return device memory at the peak by what it is for; see the module's docstring."""
    model, on_host = inventory.model, inventory.workload.computes_on_host
    if inventory.workload.mesh.is_sharded:
        return _parts_of_rank(inventory)
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


def _parts_of_rank(inventory: Inventory) -> dict[str, int]:
    """Return memory of one of several ranks on its device, or where the CPU computes, what it works in."""
    workload, whole = inventory.workload, Mesh()
    *units, root = [*groups_of(inventory.model, inventory.units, whole), Group(name="", shard_bytes=0, reduced_bytes=0)]
    if units and units[-1].is_root:
        root = units.pop()
    buffers = sum(buffer.nbytes for buffer in inventory.model.buffers() if not is_lazy(buffer))
    largest = max((unit.shard_bytes for unit in units), default=0)
    reduced = sorted((group.reduced_bytes for group in (*units, root)), reverse=True)
    kept = workload.num_micro_batches > 1 and workload.num_arrivals == 1
    shards = -(-largest // workload.mesh.num_shards)
    parts = {
        "weights outside of units, and buffers": buffers + root.shard_bytes,
        f"{NUM_SLOTS} units that are gathered": NUM_SLOTS * (largest + shards),
        "activations, logits and loss at their peak": inventory.measured.run.device_peak_bytes,
        "gradients that are reduced and leave": sum(reduced[:2]),
        "gradients that wait for the last micro-batch": sum(reduced) if kept else 0,
        # FSDP2 keeps the shards that machines have reduced, of every unit, until the backward ends
        "gradients that machines have reduced": (
            -(-sum(reduced) // workload.mesh.num_shards) if workload.mesh.num_replicas > 1 else 0
        ),
    }
    return {name: nbytes for name, nbytes in parts.items() if nbytes}
