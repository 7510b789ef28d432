"""A training job: its bytes in host memory by role, and what a step of it moves; the input of policies and predictions.

Device memory at the peak, or where the CPU computes, host memory that is not of the roles, is the sum of::

    weights and buffers that stay on the device   all but those that stream
    slots                                         NUM_SLOTS x the largest unit that streams
    activations, logits, loss                     the dry run's peak
    gradients on their way to the host            those of the two largest units or parameters outside of units

Of several ranks, each gathers a unit in the place of a slot, reduces a unit's gradients before its shard of them
leaves, and has a unit's shard on the device besides. Host memory and copies of a job are those of one machine.

It leaves out what a dry run does not see, the driver's and CUDA libraries' own memory (about 0.5 GiB a process) and
what the allocator has cached.

Per micro-batch the device reads the weights of units twice, for the forward and for the recompute, and activations go
out and come back. A gradient comes once per micro-batch. With one micro-batch it lands where it stays and the host
reads it once to measure it; with several, each is read where it landed and added to sums that are read and written.
Of several devices each copies its part; the rest is done once for the machine.
The update reads gradients, and reads and writes weights, masters and moments; weights beside float32 masters are only
written. Where the CPU computes, the same bytes are read and written by it instead of copied.

[Note: Communication volume]
Parameters are cut over N shards (`Mesh.num_shards`), and R replicas of the whole are kept (`Mesh.num_replicas`). What
is gathered or reduced together is a group: one unit, or the root, which has the parameters outside of units. With s the
bytes of one rank's shard of a group as it is gathered, and t those of the trained ones as they are reduced, both padded
to the longest shard, every rank receives, and sends as much::

    all-gather, forward     micro-batches * (N - 1) * s
    all-gather, backward    micro-batches * (N - 1) * s     units only: the root stays whole until its backward ends
    reduce-scatter          reductions * (N - 1) * t
    all-reduce              reductions * 2 * (R - 1) / R * t     of shards, between machines that replicate

Without padding, (N - 1) * s is (N - 1) / N * P * b for P parameters of b bytes. These are the volumes of rings, and the
least that any algorithm needs which lets every rank send as much as it receives. Reductions are as many as
micro-batches; with `no_sync` gradients are added up on the devices and there is one.

Not counted: two numbers of 8 bytes, on which all ranks agree once a step: the norm of gradients where they are clipped,
and which gradient is not finite.

Between machines, a ring over all ranks brings every machine what it brings one rank, however many rings the adapters of
a machine have. Where machines replicate, shards of their devices are reduced in so many rings side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_cxl.inventory.dry_run import known_parameters
from lightning_cxl.inventory.inventory import Inventory
from lightning_cxl.inventory.tensors import GRADIENTS, HostTensor, Mesh, Overlap, leaving_groups, parameter_bytes
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.ssd_options import SSD
from lightning_cxl.streaming.quantised import numel
from lightning_cxl.streaming.unit_weights import NUM_SLOTS, tensors_by_parameter
from lightning_cxl.streaming.units import NamedUnits

SSD_MOVES = ("ssd_read", "ssd_write")
COLLECTIVES = ("all-gather, forward", "all-gather, backward", "reduce-scatter", "all-reduce between machines")
Phase = Literal["forward", "backward", "update"]
"""Backward includes the recompute of units; update is the optimizer's step on the host."""


class Move(NamedTuple):
    """Bytes of a memory class that one optimizer step moves."""

    phase: Phase
    kind: Literal["h2d", "d2h", "cpu", "ssd_read", "ssd_write"]
    """A copy to the device, a copy from it, bytes that the CPUs read and write, or a transfer from or to drives."""
    nbytes: float


class Exchange(NamedTuple):
    """A collective of the ranks of a run, all of one optimizer step. See [Note: Communication volume]."""

    name: str
    phase: Phase
    kind: Literal["gather", "reduce"]
    """Before the device computes with it, or after it has computed it."""
    nbytes: float
    """Received by every rank, and sent."""
    peer_bytes: float
    """Received by each device from devices of its machine, and sent to them."""
    network_bytes: float
    """Received by each machine from others, and sent."""
    steps: float
    """Of rings, one after the other: each takes the latency of its links."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryClass:
    """The tensors of one role that are placed alike."""

    role: TensorRole
    nbytes: int
    tier: str | None = None
    """The tier that a decorator or rule asks for; None leaves it to the policy. A job has at most one such class per
    role and tier, and one per role without a tier."""
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training job, all of its micro-batches of one optimizer step together."""

    name: str
    classes: tuple[MemoryClass, ...]
    num_parameters: int = 0
    num_units: int = 1
    """Blocks that come and go one after the other."""
    num_records: int = 0
    """Of state and weights on the tier `ssd`."""
    num_visits: int = 0
    """Of these records to memory in one update, one after the other: what belongs to one unit comes together."""
    num_tokens: int = 0
    """Of one optimizer step."""
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    """With the recompute of units."""
    overlap: Overlap = "none"
    device_bytes: int | None = None
    """Peak on the device; None where it is not known."""
    exchanges: tuple[Exchange, ...] = ()
    """All other bytes of the job are those of one machine."""
    device_parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes on the device by what they are for; `device_bytes` is their sum."""
    mesh: Mesh = field(default_factory=Mesh)
    notes: tuple[str, ...] = ()
    """Assumptions and gaps, one sentence each."""

    @property
    def ssd_bytes(self) -> int:
        """Bytes on the tier `ssd`, one version of them."""
        return self.ssd_bytes_in(1)

    def ssd_bytes_in(self, versions: int) -> int:
        """Return the bytes on the tier `ssd` where state lies there in several versions; all else has one."""
        others = (TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS)
        on_ssd = [each for each in self.classes if each.tier == SSD]
        return sum(each.nbytes * (1 if each.role in others else versions) for each in on_ssd)

    @property
    def ssd_written_bytes(self) -> float:
        """Bytes that a step writes to the tier `ssd`."""
        return self.moved_bytes("ssd_write")

    @property
    def ssd_read_bytes(self) -> float:
        """Bytes that a step reads from the tier `ssd`."""
        return self.moved_bytes("ssd_read")

    def moved_bytes(self, kind: str) -> float:
        """Return the bytes of all moves of a kind; of copies, those of each device."""
        return sum(move.nbytes for each in self.classes for move in each.moves if move.kind == kind)

    def without_ssd_moves(self) -> "Job":
        """Return the job as if drives took no time."""
        classes = [
            replace(each, moves=tuple(move for move in each.moves if move.kind not in SSD_MOVES))
            for each in self.classes
        ]
        return replace(self, classes=tuple(classes))

    def in_memory(self) -> "Job":
        """Return the job as if memory were large enough: nothing has a tier, and nothing moves from or to drives."""
        job = self.without_ssd_moves()
        return replace(
            job, classes=tuple(replace(each, tier=None) for each in job.classes), num_records=0, num_visits=0
        )

    def free_classes(self) -> dict[TensorRole, MemoryClass]:
        """Return the classes that the policy decides about, by role."""
        return {each.role: each for each in self.classes if each.tier is None}

    def in_one_order(self) -> list[MemoryClass]:
        """Return the classes by role and tier: what is added up in this order does not depend on who listed them."""
        return sorted(self.classes, key=lambda each: (each.role.name, each.tier or ""))

    def bytes_of(self) -> Mapping[TensorRole, int]:
        """Return the bytes of every role."""
        total: dict[TensorRole, int] = {}
        for each in self.classes:
            total[each.role] = total.get(each.role, 0) + each.nbytes
        return total


class Group(NamedTuple):
    """Parameters that are gathered and reduced together: those of a unit, or with an empty name those of the root."""

    name: str
    shard_bytes: int
    """Input of one rank to a gather, with padding."""
    reduced_bytes: int
    """Result of a reduction on one rank, with padding."""


def groups_of(model: nn.Module, units: NamedUnits, mesh: Mesh, *, reduce_itemsize: int | None = None) -> list[Group]:
    """Return the groups of a model: its units in their order, then the root where anything is left for it.

    Args:
        model: on any device. A parameter that several modules share belongs to the first of them.
        reduce_itemsize: bytes of a number as gradients are reduced; None: as the parameter has.
    """
    left = {id(parameter): parameter for parameter in known_parameters(model)}
    groups = []
    for name, parameters in [(name, [*unit.parameters()]) for name, unit in units] + [("", list(left.values()))]:
        own = [parameter for each in parameters if (parameter := left.pop(id(each), None)) is not None]
        if own:
            shards = sum(mesh.shard_numel(p) * p.element_size() for p in own)
            reduced = sum(mesh.shard_numel(p) * (reduce_itemsize or p.element_size()) for p in own if p.requires_grad)
            groups.append(Group(name, shards, reduced))
    return groups


def exchanges(
    groups: Sequence[Group], mesh: Mesh, num_micro_batches: int = 1, *, no_sync: bool = False
) -> tuple[Exchange, ...]:
    """Return what the ranks exchange in one step. See [Note: Communication volume]."""
    if not mesh.is_sharded:
        return ()
    ring, replicas = mesh.num_shards - 1, mesh.num_replicas - 1
    reductions = 1 if no_sync else num_micro_batches
    reduced = sum(group.reduced_bytes for group in groups)
    all_reduce = reductions * 2 * replicas / mesh.num_replicas * reduced

    def among_shards(name: str, phase: Phase, kind: Any, calls: int, shard: int, num_groups: int) -> Exchange:
        nbytes = float(calls * ring * shard)
        peer = nbytes if mesh.num_devices > 1 else 0.0
        network = nbytes if mesh.num_shards > mesh.num_devices else 0.0
        return Exchange(name, phase, kind, nbytes, peer, network, calls * num_groups * ring)

    shards, in_units = (sum(g.shard_bytes for g in groups if g.name or with_root) for with_root in (True, False))
    # the norm of gradients, and which of them are not finite: two numbers of 8 bytes, which are not counted as received
    norm = among_shards("norm", "update", "reduce", 1, 0, 2)
    norm = norm._replace(
        peer_bytes=16.0 * (mesh.num_devices > 1), network_bytes=16.0 * (mesh.num_shards > mesh.num_devices)
    )
    found = (
        among_shards(COLLECTIVES[0], "forward", "gather", num_micro_batches, shards, len(groups)),
        among_shards(COLLECTIVES[1], "backward", "gather", num_micro_batches, in_units, len(groups)),
        among_shards(COLLECTIVES[2], "backward", "reduce", reductions, reduced, len(groups)),
        Exchange(
            *(COLLECTIVES[3], "backward", "reduce", all_reduce),
            *(0.0, mesh.num_devices * all_reduce, reductions * len(groups) * 2 * replicas),
        ),
        norm,
    )
    return tuple(each for each in found if each.peer_bytes or each.network_bytes or each.steps)


def model_job(name: str, inventory: Inventory) -> Job:
    """Return the job of a model that is trained."""
    workload, run, mesh = inventory.workload, inventory.measured, inventory.workload.mesh
    parts, n = _device_parts(inventory), workload.num_micro_batches
    groups = groups_of(inventory.model, inventory.units, mesh)
    return Job(
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
        exchanges=exchanges(groups, mesh, n, no_sync=workload.no_sync),
        device_parts=parts,
        mesh=mesh,
        notes=(run.note,) if run.note else (),
    )


def _classes(inventory: Inventory) -> tuple[MemoryClass, ...]:
    """Return a class per role and tier that is asked for; each has its part of the role's moves."""
    of_class: dict[tuple[TensorRole, str | None], list[HostTensor]] = {}
    for each in inventory.tensors:
        of_class.setdefault((each.role, each.tier), []).append(each)
    moves_of = {role: _moves(inventory, role) for role, _ in of_class}
    classes = []
    for (role, tier), tensors in of_class.items():
        nbytes = sum(each.nbytes for each in tensors)
        part = nbytes / max(1, inventory.bytes_of(role))
        moves = tuple(move._replace(nbytes=move.nbytes * part) for move in moves_of[role])
        nbytes *= inventory.copies_of(role)
        if tier == SSD:
            updated = sum(each.nbytes for each in tensors if each.is_updated)
            moves += _moves_of_drives(role, nbytes, updated, inventory.workload.num_micro_batches)
        classes.append(MemoryClass(role=role, nbytes=nbytes, tier=tier, moves=moves))
    return tuple(classes)


def _moves_of_drives(role: TensorRole, nbytes: int, updated_bytes: int, num_micro_batches: int) -> tuple[Move, ...]:
    """Return the moves of a class on the tier `ssd`, beside what the CPUs read and write of it in memory."""
    each_time = float(num_micro_batches * nbytes)
    if role is TensorRole.ACTIVATIONS:
        return Move("forward", "ssd_write", each_time), Move("backward", "ssd_read", each_time)
    updates = Move("update", "ssd_read", float(updated_bytes)), Move("update", "ssd_write", float(updated_bytes))
    if role is not TensorRole.COMPUTE_WEIGHTS:
        return updates
    moves = (Move("forward", "ssd_read", each_time), Move("backward", "ssd_read", each_time), *updates)
    return tuple(move for move in moves if move.nbytes)


def _moves(inventory: Inventory, role: TensorRole) -> tuple[Move, ...]:
    """Return the moves of all bytes of a role; the rules are in the module's docstring."""
    workload, mesh, nbytes = inventory.workload, inventory.workload.mesh, inventory.bytes_of(role)
    n, num_arrivals = workload.num_micro_batches, workload.num_arrivals
    if role is TensorRole.ACTIVATIONS:
        return Move("forward", "d2h", float(n * nbytes)), Move("backward", "h2d", float(n * nbytes))
    all_on_host = workload.computes_on_host or mesh.is_sharded
    separate = [each for each in inventory.gradients if each.role is TensorRole.MASTER_GRADS]
    on_host = [each for each in separate if each.unit or all_on_host]
    if role is TensorRole.COMPUTE_WEIGHTS:
        parameters = known_parameters(inventory.model)
        trained = sum(p.nbytes for p in parameters if p.requires_grad) / max(1, sum(p.nbytes for p in parameters))
        # the update reads compute weights where they are masters, or the upper halves of them
        update = round(nbytes * trained) * (1 if on_host else 2)
        root = 0  # of several ranks, weights outside of units stay on the device until the backward ends
        if mesh.is_sharded and not workload.computes_on_host:
            root = sum(each.nbytes for each in inventory.tensors if each.role is role and not each.unit)
        read, again = n * nbytes / mesh.num_devices, n * (nbytes - root) / mesh.num_devices
        return Move("forward", "h2d", read), Move("backward", "h2d", again), Move("update", "cpu", float(update))
    staged = inventory.staged_bytes
    if role is TensorRole.STAGING:
        return Move("backward", "d2h", staged / mesh.num_devices), Move("backward", "cpu", float(staged))
    if role in GRADIENTS:
        own = [each for each in inventory.gradients if each.role is role]
        part = parameter_bytes(own) / max(1, parameter_bytes(inventory.gradients))
        of_all = [each.parameter for each in inventory.gradients if each.parameter is not None]
        arriving = round(part * mesh.machine_bytes(parameter_bytes(inventory.gradients), of_all))
        staged, kept = round(part * staged), sum(each.nbytes for each in own)
        once = num_arrivals == 1
        # measured where it lies, and copied out of staging memory; or added to sums
        touched = arriving + staged if once else num_arrivals * (arriving + 2 * kept)
        moves = (
            Move("backward", "d2h", (num_arrivals * arriving - staged) / mesh.num_devices),
            Move("backward", "cpu", float(touched)),
            Move("update", "cpu", float(kept)),
        )
        return tuple(move for move in moves if move.nbytes)
    in_place = Move("update", "cpu", 2.0 * nbytes)
    written_back = parameter_bytes(separate) - parameter_bytes(on_host)  # weights on the device, after the update
    if role is TensorRole.MASTER_WEIGHTS and written_back:
        return in_place, Move("update", "h2d", float(written_back))
    return (in_place,)


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
        "activations, logits and loss at their peak": inventory.measured.device_peak_bytes,
        "gradients on their way to the host": 0 if on_host else sum(map(parameter_bytes, leaving)),
    }
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def _parts_of_rank(inventory: Inventory) -> dict[str, int]:
    """Return memory of one of several ranks on its device, or where the CPU computes, what it works in."""
    workload = inventory.workload
    *units, root = [*groups_of(inventory.model, inventory.units, Mesh()), Group("", 0, 0)]
    if units and not units[-1].name:
        root = units.pop()
    buffers = sum(buffer.nbytes for buffer in inventory.model.buffers() if not is_lazy(buffer))
    largest = max((unit.shard_bytes for unit in units), default=0)
    reduced = sorted((group.reduced_bytes for group in (*units, root)), reverse=True)
    kept = workload.num_micro_batches > 1 and workload.num_arrivals == 1
    shards = -(-largest // workload.mesh.num_shards)
    parts = {
        "weights outside of units, and buffers": buffers + root.shard_bytes,
        f"{NUM_SLOTS} units that are gathered": NUM_SLOTS * (largest + shards),
        "activations, logits and loss at their peak": inventory.measured.device_peak_bytes,
        "gradients that are reduced and leave": sum(reduced[:2]),
        "gradients that wait for the last micro-batch": sum(reduced) if kept else 0,
        # FSDP2 keeps the shards that machines have reduced, of every unit, until the backward ends
        "gradients that machines have reduced": (
            -(-sum(reduced) // workload.mesh.num_shards) if workload.mesh.num_replicas > 1 else 0
        ),
    }
    return {name: nbytes for name, nbytes in parts.items() if nbytes}
