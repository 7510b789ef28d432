"""A training job: its bytes in host memory by role, and what a step of it moves; the input of policies and predictions.

Device memory at the peak, or where the CPU computes, host memory that is not of the roles, is the sum of::

    weights and buffers that stay on the device   all but those that stream
    slots                                         NUM_SLOTS x the largest unit that streams
    activations, logits, loss                     the dry run's peak
    gradients on their way to the host            those of the two largest units or parameters outside of units
    state and gradients that stay on the device   with `state_on_device`: 12 bytes per parameter, 8 of float32 weights

Of several ranks, each gathers a unit in the place of a slot, reduces a unit's gradients before its shard of them
leaves, and has a unit's shard on the device besides. Host memory and copies of a job are those of one machine.

It leaves out what a dry run does not see, the driver's and CUDA libraries' own memory (about 0.5 GiB a process), what
the allocator has cached, and the time of updates on the device (about 40 bytes per parameter are read and written).

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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import nn

from lightning_cxl.config import SSD
from lightning_cxl.errors import ConfigError
from lightning_cxl.inventory.plan import Plan
from lightning_cxl.inventory.tensors import GRADIENTS, Mesh, Overlap, PlannedTensor, offload_groups, parameter_bytes
from lightning_cxl.machine.speeds import Machine, MachineTier, Split, check_split
from lightning_cxl.memory.placement import TensorRole
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
    kind: Literal["gather", "reduce"]  # before the device computes with it, or after it has computed it
    nbytes: float  # received by every rank, and sent
    peer_bytes: float  # received by each device from devices of its machine, and sent to them
    network_bytes: float  # received by each machine from others, and sent
    steps: float  # of rings, one after the other: each takes the latency of its links


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
    num_pieces: int = 0
    """What is copied beside computation, one after the other, where there are no units."""
    num_records: int = 0
    """Of state and weights on the tier `ssd`."""
    num_swaps: int = 0
    """Of these records to memory in one update, one after the other: what belongs to one unit comes together."""
    num_micro_batches: int = 1
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

    def ssd_bytes(self, versions: int = 1) -> int:
        """Return the bytes on the tier `ssd`; state may lie there in several versions, all else has one."""
        others = (TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS)
        on_ssd = [each for each in self.classes if each.tier == SSD]
        return sum(each.nbytes * (1 if each.role in others else versions) for each in on_ssd)

    def moved_bytes(self, kind: str) -> float:
        """Return the bytes of all moves of a kind; of copies, those of each device."""
        return sum(move.nbytes for each in self.classes for move in each.moves if move.kind == kind)

    def without_ssd_moves(self) -> "Job":
        """Return the job as if drives took no time."""
        classes = (
            replace(each, moves=tuple(m for m in each.moves if m.kind not in SSD_MOVES)) for each in self.classes
        )
        return replace(self, classes=tuple(classes))

    def free_classes(self) -> dict[TensorRole, MemoryClass]:
        """Return the classes that the policy decides about, by role."""
        return {each.role: each for each in self.classes if each.tier is None}

    def bytes_of(self) -> Mapping[TensorRole, int]:
        total: dict[TensorRole, int] = {}
        for each in self.classes:
            total[each.role] = total.get(each.role, 0) + each.nbytes
        return total


class UnitShards(NamedTuple):
    """Parameters that are gathered and reduced together: those of a unit, or with an empty name those of the root."""

    name: str
    shard_bytes: int  # input of one rank to a gather, with padding
    reduced_bytes: int  # result of a reduction on one rank, with padding


def groups_of(model: nn.Module, units: NamedUnits, mesh: Mesh) -> list[UnitShards]:
    """Return the groups of a model: its units in their order, then the root where anything is left for it."""
    left = {id(parameter): parameter for parameter in model.parameters()}
    groups = []
    for name, parameters in [(name, [*unit.parameters()]) for name, unit in units] + [("", list(left.values()))]:
        own = [parameter for each in parameters if (parameter := left.pop(id(each), None)) is not None]
        if own:
            shards = sum(mesh.shard_numel(p) * p.element_size() for p in own)
            reduced = sum(mesh.shard_numel(p) * p.element_size() for p in own if p.requires_grad)
            groups.append(UnitShards(name, shards, reduced))
    return groups


def exchanges(
    groups: Sequence[UnitShards], mesh: Mesh, num_micro_batches: int = 1, *, no_sync: bool = False
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


def model_job(name: str, plan: Plan) -> Job:
    workload, run, mesh = plan.workload, plan.measured, plan.workload.mesh
    found = _parts_of_rank(plan) if mesh.is_sharded else _device_parts(plan)
    parts, n = {name: nbytes for name, nbytes in found.items() if nbytes}, workload.num_micro_batches
    groups = groups_of(plan.model, plan.units, mesh)
    return Job(
        name=name,
        classes=_classes(plan),
        num_parameters=sum(numel(p) for p in plan.model.parameters()),
        num_units=max(1, len(plan.units)),
        # each gradient leaves when it is made; what FSDP2 cuts without units is gathered and reduced as a whole
        num_pieces=0 if plan.units or mesh.is_sharded else sum(p.requires_grad for p in plan.model.parameters()),
        num_records=sum(not record.is_inputs for record in plan.ssd_records),
        num_swaps=len({each.owner for each in plan.ssd_records if each.is_updated}),
        num_micro_batches=n,
        num_tokens=workload.batch * workload.sequence * n * mesh.num_ranks,
        forward_flops=run.forward_flops * n,
        backward_flops=run.backward_flops * n,
        overlap=plan.overlap,
        device_bytes=sum(parts.values()) if run.device_peak_bytes else None,
        exchanges=exchanges(groups, mesh, n, no_sync=workload.no_sync),
        device_parts=parts,
        mesh=mesh,
        notes=(run.note,) if run.note else (),
    )


def _classes(plan: Plan) -> tuple[MemoryClass, ...]:
    """Return a class per role and tier that is asked for; each has its part of the role's moves."""
    of_class: dict[tuple[TensorRole, str | None], list[PlannedTensor]] = {}
    for each in plan.tensors:
        of_class.setdefault((each.role, each.tier), []).append(each)
    moves_of = {role: _moves(plan, role) for role, _ in of_class}
    classes = []
    for (role, tier), tensors in of_class.items():
        nbytes = sum(each.nbytes for each in tensors)
        part = nbytes / max(1, plan.bytes_of(role))
        moves = [move._replace(nbytes=move.nbytes * part) for move in moves_of[role]]
        nbytes *= plan.copies_of(role)
        if tier == SSD:  # beside what the CPUs read and write of it in memory
            each_time = float(plan.workload.num_micro_batches * nbytes)
            updated = float(sum(each.nbytes for each in tensors if each.is_updated))
            if role is TensorRole.ACTIVATIONS:
                moves += [Move("forward", "ssd_write", each_time), Move("backward", "ssd_read", each_time)]
            elif role is TensorRole.COMPUTE_WEIGHTS:
                moves += [Move("forward", "ssd_read", each_time), Move("backward", "ssd_read", each_time)]
            if role is not TensorRole.ACTIVATIONS and (updated or role is not TensorRole.COMPUTE_WEIGHTS):
                moves += [Move("update", "ssd_read", updated), Move("update", "ssd_write", updated)]
        classes.append(MemoryClass(role=role, nbytes=nbytes, tier=tier, moves=tuple(moves)))
    return tuple(classes)


def _moves(plan: Plan, role: TensorRole) -> tuple[Move, ...]:
    """Return the moves of all bytes of a role; the rules are in the module's docstring."""
    workload, mesh, nbytes = plan.workload, plan.workload.mesh, plan.bytes_of(role)
    n, num_arrivals = workload.num_micro_batches, workload.num_arrivals
    if role is TensorRole.ACTIVATIONS:
        return Move("forward", "d2h", float(n * nbytes)), Move("backward", "h2d", float(n * nbytes))
    all_on_host = workload.computes_on_host or mesh.is_sharded
    separate = [each for each in plan.gradients if each.role is TensorRole.MASTER_GRADS]
    on_host = [each for each in separate if each.unit or all_on_host]
    if role is TensorRole.COMPUTE_WEIGHTS:
        parameters = list(plan.model.parameters())
        trained = sum(p.nbytes for p in parameters if p.requires_grad) / max(1, sum(p.nbytes for p in parameters))
        # the update reads compute weights where they are masters, or the upper halves of them
        update = round(nbytes * trained) * (1 if on_host else 2)
        root = 0  # of several ranks, weights outside of units stay on the device until the backward ends
        if mesh.is_sharded and not workload.computes_on_host:
            root = sum(each.nbytes for each in plan.tensors if each.role is role and not each.unit)
        read, again = n * nbytes / mesh.num_devices, n * (nbytes - root) / mesh.num_devices
        return Move("forward", "h2d", read), Move("backward", "h2d", again), Move("update", "cpu", float(update))
    staged = plan.staged_bytes
    if role is TensorRole.STAGING:
        return Move("backward", "d2h", staged / mesh.num_devices), Move("backward", "cpu", float(staged))
    if role in GRADIENTS:
        own = [each for each in plan.gradients if each.role is role]
        part = parameter_bytes(own) / max(1, parameter_bytes(plan.gradients))
        of_all = [each.parameter for each in plan.gradients if each.parameter is not None]
        arriving = round(part * mesh.machine_bytes(parameter_bytes(plan.gradients), of_all))
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


def _device_parts(plan: Plan) -> dict[str, int]:
    """Return device memory at the peak by what it is for; see the module's docstring."""
    model, on_host, streamed = plan.model, plan.workload.computes_on_host, plan.unit_of
    unit_bytes: dict[str, int] = {}
    for each in plan.tensors:
        if each.unit and each.role is TensorRole.COMPUTE_WEIGHTS:
            unit_bytes[each.unit] = unit_bytes.get(each.unit, 0) + each.nbytes
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    tensors = tensors_by_parameter(model)
    rest = sum(t.nbytes for p in model.parameters() if id(p) not in streamed for t in tensors[id(p)])
    leaving = offload_groups(plan.gradients)[:2]  # one is copied, one is computed
    there = plan.on_device.values()
    wide = [4 if plan.workload.num_micro_batches > 1 else p.element_size() for p in there]  # a sum is float32
    return {
        "weights that stay on the device": 0 if on_host else rest + buffers,
        f"{NUM_SLOTS} slots for weights that stream": NUM_SLOTS * max(unit_bytes.values(), default=0),
        "activations, logits and loss at their peak": plan.measured.device_peak_bytes,
        "gradients on their way to the host": 0 if on_host else sum(map(parameter_bytes, leaving)),
        "optimizer state that stays on the device": sum(p.numel() * (12 if p.element_size() < 4 else 8) for p in there),
        "gradients that stay on the device": sum(p.numel() * size for p, size in zip(there, wide, strict=True)),
    }


def _parts_of_rank(plan: Plan) -> dict[str, int]:
    """Return memory of one of several ranks on its device, or where the CPU computes, what it works in."""
    workload = plan.workload
    *units, root = [*groups_of(plan.model, plan.units, Mesh()), UnitShards("", 0, 0)]
    if units and not units[-1].name:
        root = units.pop()
    buffers = sum(buffer.nbytes for buffer in plan.model.buffers())
    largest = max((unit.shard_bytes for unit in units), default=0)
    reduced = sorted((group.reduced_bytes for group in (*units, root)), reverse=True)
    kept = workload.num_micro_batches > 1 and workload.num_arrivals == 1
    shards = -(-largest // workload.mesh.num_shards)
    return {
        "weights outside of units, and buffers": buffers + root.shard_bytes,
        f"{NUM_SLOTS} units that are gathered": NUM_SLOTS * (largest + shards),
        "activations, logits and loss at their peak": plan.measured.device_peak_bytes,
        "gradients that are reduced and leave": sum(reduced[:2]),
        "gradients that wait for the last micro-batch": sum(reduced) if kept else 0,
        # FSDP2 keeps the shards that machines have reduced, of every unit, until the backward ends
        "gradients that machines have reduced": (
            -(-sum(reduced) // workload.mesh.num_shards) if workload.mesh.num_replicas > 1 else 0
        ),
    }


# Predicted seconds: of an Adam update on the host, of a copy, and of one optimizer step (`predict_step`).
#
# Work that is split over tiers uses them side by side: the slowest one decides. Of Adam's 28 bytes of an element,
# weight, gradient, momentum and variance are read, and all but the gradient are written back. Reads of a device were
# measured to take what the slower of link and tier takes, but writes longer than that where both are about equally
# fast: the soft maximum of t1 and t2 is (t1^p + t2^p)^(1/p) with p `Machine.write_contention`.
#
# Measurements on the machine of arXiv 2507.03305 are met within 4 % from 64 M elements and 64 MiB on, with one or two
# devices (``tests/unit/planning/jobs/test_perf.py``; ``examples/machines/paper_a.yaml`` says how each constant was
# found). Smaller sizes stay in caches or are dominated by the start of threads, and are predicted too fast.
#
# A step: resources work side by side: the device, each direction of its link, every memory tier, links of devices and
# the network. A phase fetches, gathers, computes, reduces and writes back unit after unit. Where stages take F, G, C, R
# and W seconds in all, such a pipeline of units that are alike takes::
#
#     phase = max((F + G + C + R + W) / units + (1 - 1 / units) * max(F, G, C, R, W), busiest shared + C / units)
#
# The first term is its longest stage, and of the others one unit's part, the fill and the drain. The second says that
# what may serve several stages, a tier, peer links or the network, rests while one unit is computed. A cache that takes
# in a copy's writes does not help here, as a step writes many times its size.
#
# State on the tier `ssd` is swapped in to be updated, one unit after the other: one is read while another is updated
# and a third is written, each at the speed of all drives together, so the update is such a pipeline, too. Behind a
# backward or forward, reads and writes are two more resources of it. So are reads of weights that lie there. The
# traffic of memory for these transfers is left out.
#
# The update is a phase of its own (`Overlap` "none"), or it shares the resources of the last micro-batch's backward, of
# the first one's forward in the next step, or of both together, except for one unit's part: the last unit's gradients
# are there only when the backward ends, and the first unit's weights must be new before the forward starts.
#
# On a machine whose device is the host nothing is copied: the CPUs read and write what would be. Several devices each
# do the job's copies and flops on an own link, and share tiers; the update runs once, each rank that of its shards. A
# tier that another one backs uses that one's bandwidth.
#
# A gather or a reduction takes as long as the busier of peer links and network, with latencies of the network where
# machines take part. Where devices have no links to each other, what they exchange goes through host memory: out over
# the link of one device, and in over that of another one. Where the CPU is the device, it is written and read by it.

ADAM_BYTES_PER_ELEMENT = 28  # of float32 Adam: 16 read, 12 written
_ADAM_STORED_BYTES = 16


def predict_adam_seconds(num_elements: int, split: Split, machine: Machine) -> float:
    """Return how long one float32 Adam update takes on the host, as a benchmark measures it.

    A benchmark updates the same arrays again and again, so that the cache still has a part of them. A training step
    touches each element once: the cache then matters only for what it happens to hold at the end, and
    `lightning_cxl.planning.job` leaves it out.

    Args:
        num_elements: of the parameters.
        split: the fraction of the elements on each tier.
        machine: with the tiers that `split` names.

    Raises:
        TierNotFoundError: a tier that the machine does not have.
        ValueError: a negative number, or fractions that do not add up to 1.
    """
    _check_count("num_elements", num_elements)
    total = ADAM_BYTES_PER_ELEMENT * num_elements
    cache = machine.cache
    cached = min(_ADAM_STORED_BYTES * num_elements, cache.nbytes) * ADAM_BYTES_PER_ELEMENT / _ADAM_STORED_BYTES
    slowest = max(share / tier.adam_bytes_per_s for tier, share in _by_memory(split, machine))
    return cached / cache.bytes_per_s + (total - cached) * slowest


def predict_copy_seconds(
    num_bytes: int, split: Split, machine: Machine, direction: Literal["h2d", "d2h"] = "h2d", num_devices: int = 1
) -> float:
    """Return how long a copy of page-locked host memory takes.

    Args:
        num_bytes: of each device.
        split: the fraction of the bytes on each tier.
        machine: with the tiers that `split` names.
        direction: to the device or from it.
        num_devices: so many devices copy as much at the same time, each over a link of its own.

    Raises:
        TierNotFoundError: a tier that the machine does not have.
        ValueError: a negative number, an unknown direction, no device, or fractions that do not add up to 1.
    """
    _check_count("num_bytes", num_bytes)
    if direction not in ("h2d", "d2h"):
        raise ValueError(f'direction must be "h2d" or "d2h", got {direction!r}')
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, got {num_devices}")
    parts = [(tier, num_devices * num_bytes * share) for tier, share in _by_memory(split, machine)]
    if num_bytes == 0:
        return 0.0
    device = machine.device
    if direction == "h2d":
        reads = [nbytes / tier.device_read_bytes_per_s for tier, nbytes in parts]
        return device.copy_latency_s + max(num_bytes / device.h2d_bytes_per_s, *reads)
    writing = max(max(0.0, nbytes - t.device_write_buffer_bytes) / t.device_write_bytes_per_s for t, nbytes in parts)
    return device.copy_latency_s + soft_maximum(num_bytes / device.d2h_bytes_per_s, writing, machine.write_contention)


def soft_maximum(first: float, second: float, sharpness: float) -> float:
    """Return the `sharpness`-norm of two durations: at least the longer one, more if they are about equally long."""
    shorter, longer = sorted((first, second))
    if shorter <= 0 or math.isinf(sharpness):
        return longer
    return float(longer * (1 + (shorter / longer) ** sharpness) ** (1 / sharpness))


def _by_memory(split: Split, machine: Machine) -> list[tuple[MachineTier, float]]:
    """Return the tiers whose memory is used, with their fractions; tiers that another one backs count for that one."""
    check_split(split, machine)
    shares: dict[str, float] = {}
    for name, share in split.items():
        memory = machine.tier(name).backed_by or name
        shares[memory] = shares.get(memory, 0.0) + share
    return [(machine.tier(name), share) for name, share in shares.items()]


def _check_count(name: str, value: int) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got {value}")


_PHASES: tuple[Phase, ...] = ("forward", "backward", "update")
_KINDS = ("h2d", "d2h", "cpu")
_HIDING: Mapping[Overlap, tuple[int, ...]] = {"none": (), "forward": (0,), "backward": (1,), "both": (0, 1)}
"""Places in `_PHASES` of those that hide the update: the last backward of a step, and the first forward of the next."""
_NEAREST = 0
# The load of one phase is a flat list. Its parts begin at these places: seconds of compute; bytes on the link, to and
# from the device; bytes read from and written to drives; seconds of peer links and network for gathers, and for
# reductions; then for every tier the bytes copied to devices, copied from them, and moved by the CPUs.
_COMPUTE, _LINK, _SSD, _GATHER, _REDUCE, _TIERS = 0, 1, 3, 5, 7, 9


@dataclass(frozen=True, slots=True)
class PhaseTime:
    seconds: float  # its part of the step
    resources: Mapping[str, float]
    """Seconds that each resource is busy: ``"compute"``, ``"link h2d"``, ``"link d2h"``, ``"tier <name>"``, and where
    state is on the tier `ssd`, ``"ssd read"`` and ``"ssd write"``; of several ranks ``"peer links"`` and
    ``"network"``."""

    @property
    def bound_by(self) -> str:
        """The resource that is busy longest; ``"nothing"`` for a phase without work."""
        name = max(self.resources, key=lambda each: self.resources[each])
        return name if self.resources[name] > 0 else "nothing"


@dataclass(frozen=True, slots=True)
class StepTime:
    """One optimizer step; `update` has all work of the update, and the seconds of it that no other phase hides."""

    forward: PhaseTime
    backward: PhaseTime
    update: PhaseTime
    overlap: Overlap
    serial_seconds: float  # seconds of the same work if the update does not overlap

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds + self.update.seconds

    @property
    def hidden_seconds(self) -> float:
        return self.serial_seconds - self.seconds

    def phases(self) -> dict[Phase, PhaseTime]:
        return {"forward": self.forward, "backward": self.backward, "update": self.update}

    def busy_seconds(self) -> dict[str, float]:
        """Return the seconds that each resource is busy, by name as in `PhaseTime`."""
        phases = [phase.resources for phase in self.phases().values()]
        return {name: sum(each.get(name, 0.0) for each in phases) for each in phases for name in each}

    @property
    def bound_by(self) -> str:
        return PhaseTime(self.seconds, self.busy_seconds()).bound_by

    def describe(self) -> str:
        """Return e.g. ``"forward 1.20 s (compute), backward 3.10 s (compute), update 0.81 s (tier dram0)"``."""
        text = ", ".join(f"{name} {each.seconds:.2f} s ({each.bound_by})" for name, each in self.phases().items())
        if self.overlap == "none":
            return text
        behind = "backward and the forward" if self.overlap == "both" else self.overlap
        return f"{text}; the update overlaps the {behind} and hides {self.hidden_seconds:.2f} s"


def predict_step(job: Job, splits: Mapping[TensorRole, Split], machine: Machine) -> StepTime:
    """Return how long a step takes, whatever tiers can hold; drives of unknown speed count as if they took no time."""
    for split in splits.values():
        check_split(split, machine)
    return StepModel(job, machine).explain(splits)


class StepModel:
    """Predicts the step of one job on one machine for many splits; asking costs some ten microseconds.

    `seconds` is convex in the splits' fractions. It trusts them: `check_split` is the caller's.
    """

    def __init__(self, job: Job, machine: Machine) -> None:
        self._machine = machine
        self._overlap = job.overlap
        self._units = max(1, job.num_pieces or job.num_units)
        self._micro_batches = job.num_micro_batches
        self._device = machine.device
        self._index = {name: machine.names.index(machine.tier(name).backed_by or name) for name in machine.names}
        self._speeds = [
            (1 / t.device_read_bytes_per_s, 1 / t.device_write_bytes_per_s, 1 / t.adam_bytes_per_s)
            for t in machine.tiers
        ]
        self._fixed = [[0.0] * (_TIERS + len(_KINDS) * len(machine.tiers)) for _ in _PHASES]
        self._fixed[0][_COMPUTE] = job.forward_flops / self._device.flops
        self._fixed[1][_COMPUTE] = job.backward_flops / self._device.flops
        self._has_exchanges = bool(job.exchanges)
        for phase, through_host in enumerate(self._exchange(job)):
            if through_host:
                ways = [self._copied(phase, kind, through_host) for kind in (0, 1)]
                self._add(self._fixed, ways, {machine.tiers[_NEAREST].name: 1.0})
        self._swaps = max(1, job.num_swaps)
        self._ssd_speeds = (0.0, 0.0)  # seconds per byte; as if it took no time where they are not known
        if machine.ssd is not None and machine.ssd.read_bytes_per_s and machine.ssd.write_bytes_per_s:
            self._ssd_speeds = (1 / machine.ssd.read_bytes_per_s, 1 / machine.ssd.write_bytes_per_s)
        self._free: dict[TensorRole, list[tuple[int, int, float]]] = {}
        # what is added up in this order does not depend on who listed the classes
        for each in sorted(job.classes, key=lambda each: (each.role.name, each.tier or "")):
            moves = []
            for move in each.moves:
                if move.kind in SSD_MOVES:
                    self._fixed[_PHASES.index(move.phase)][_SSD + SSD_MOVES.index(move.kind)] += move.nbytes
                    continue
                phase, kind = _PHASES.index(move.phase), _KINDS.index(move.kind)
                moves.append((phase, kind, move.nbytes) if kind == 2 else self._copied(phase, kind, move.nbytes))
            if each.tier is None:
                if moves:
                    self._free.setdefault(each.role, []).extend(moves)
            else:  # what is on drives is updated in memory, in slots
                tier = machine.tiers[_NEAREST] if each.tier == SSD else machine.tier(each.tier)
                self._add(self._fixed, moves, {tier.name: 1.0})

    def seconds(self, splits: Mapping[TensorRole, Split]) -> float:
        """Return the seconds of the whole step; see `predict_step`."""
        *work, update = self._loads(splits)
        return sum(map(self._seconds, work)) + self._left_of_update(work, update)

    def explain(self, splits: Mapping[TensorRole, Split]) -> StepTime:
        """Return the whole step, phase by phase; see `predict_step`."""
        *work, update = self._loads(splits)
        forward, backward = (PhaseTime(self._seconds(load), self._resources(load)) for load in work)
        after = PhaseTime(self._left_of_update(work, update), self._resources(update))
        serial = forward.seconds + backward.seconds + self._update_seconds(update)
        return StepTime(forward, backward, after, self._overlap, serial)

    def _exchange(self, job: Job) -> list[float]:
        """Add the seconds of links that ranks use, and return bytes by phase that devices send through host memory."""
        links, through_host = self._machine.links, [0.0] * len(_PHASES)
        for each in job.exchanges:
            if each.network_bytes and links.network_bytes_per_s is None:
                raise ConfigError(
                    f"machines exchange data, and machine `{self._machine.name}` does not say how fast: give "
                    f"network_bytes_per_s under `links` in its file (--tiers), what one machine sends over all of its "
                    "adapters, such as `network_bytes_per_s: 50 GB/s`; examples/machines/eight_gpus.yaml has all links"
                )
            phase, crosses = _PHASES.index(each.phase), each.network_bytes > 0
            latency = each.steps * (links.network_latency_s if crosses else links.peer_latency_s)
            network = each.network_bytes / (links.network_bytes_per_s or 1.0) + latency if crosses else 0.0
            peer = 0.0 if crosses else latency
            if links.peer_bytes_per_s is None or self._device.is_host:
                through_host[phase] += each.peer_bytes
            else:
                peer += each.peer_bytes / links.peer_bytes_per_s
            way = _GATHER if each.kind == "gather" else _REDUCE
            self._fixed[phase][way] += peer
            self._fixed[phase][way + 1] += network
        return through_host

    def _left_of_update(self, work: list[list[float]], update: list[float]) -> float:
        """Return the seconds of the update that no other phase hides."""
        hiding = [work[phase] for phase in _HIDING[self._overlap]]
        window = [sum(loads) / self._micro_batches for loads in zip(*hiding, strict=True)] or [0.0] * len(update)
        alone = 1 / self._units if hiding else 1.0
        together = [own + (1 - alone) * extra for own, extra in zip(window, update, strict=True)]
        hidden_in = sum(map(self._seconds, hiding)) / self._micro_batches
        return alone * self._update_seconds(update) + max(0.0, self._seconds(together) - hidden_in)

    def _loads(self, splits: Mapping[TensorRole, Split]) -> list[list[float]]:
        loads = [list(each) for each in self._fixed]
        for role, moves in self._free.items():
            if role not in splits:
                raise ConfigError(
                    f"there is no split for {role.value}, which no rule places: "
                    f"got {', '.join(each.value for each in splits)}"
                )
            self._add(loads, moves, splits[role])
        return loads

    def _copied(self, phase: int, kind: int, nbytes: float) -> tuple[int, int, float]:
        """Return what copies of each device ask of tiers; the CPUs read and write it where the host is the device."""
        together = nbytes * self._device.count
        if self._device.is_host:
            return phase, 2, together
        self._fixed[phase][_LINK + kind] += nbytes
        return phase, kind, together

    def _add(self, loads: list[list[float]], moves: list[tuple[int, int, float]], split: Split) -> None:
        for tier, share in split.items():
            first = _TIERS + len(_KINDS) * self._index[tier]
            for phase, kind, nbytes in moves:
                loads[phase][first + kind] += share * nbytes

    def _seconds(self, load: list[float]) -> float:
        """Return what forward or backward takes; the formulas are the module's."""
        return max(self._seconds_in_memory(load), *self._ssd_seconds(load))

    def _update_seconds(self, load: list[float]) -> float:
        stages = (self._seconds_in_memory(load), *self._ssd_seconds(load))
        return sum(stages) / self._swaps + (1 - 1 / self._swaps) * max(stages)

    def _ssd_seconds(self, load: list[float]) -> tuple[float, float]:
        return load[_SSD] * self._ssd_speeds[0], load[_SSD + 1] * self._ssd_speeds[1]

    def _exchange_seconds(self, load: list[float]) -> tuple[float, float]:
        return load[_GATHER] + load[_REDUCE], load[_GATHER + 1] + load[_REDUCE + 1]  # of peer links, and of the network

    def _seconds_in_memory(self, load: list[float]) -> float:
        compute = load[_COMPUTE]
        h2d, d2h = self._link_seconds(load)
        fetch, stored, busiest = h2d, 0.0, max(self._exchange_seconds(load))
        for index, (per_read, per_write, per_byte) in enumerate(self._speeds):
            first = _TIERS + len(_KINDS) * index
            read, written, cpu = load[first : first + len(_KINDS)]
            if read or written or cpu:
                reading, writing = read * per_read, written * per_write
                fetch = max(fetch, reading)
                stored = max(stored, writing)
                busiest = max(busiest, cpu * per_byte + max(reading, writing, (read + written) * per_byte))
        if self._device.is_host:
            return max(compute, busiest)
        store = soft_maximum(d2h, stored, self._machine.write_contention)
        gather, reduction = max(load[_GATHER : _GATHER + 2]), max(load[_REDUCE : _REDUCE + 2])
        stages = (fetch, gather, compute, reduction, store)
        pipeline = sum(stages) / self._units + (1 - 1 / self._units) * max(stages)
        return max(pipeline, busiest + compute / self._units)

    def _link_seconds(self, load: list[float]) -> tuple[float, float]:
        device, latency = self._device, self._device.copy_latency_s * self._units
        h2d, d2h = load[_LINK : _LINK + 2]
        return (
            h2d / device.h2d_bytes_per_s + latency if h2d else 0.0,
            d2h / device.d2h_bytes_per_s + latency if d2h else 0.0,
        )

    def _resources(self, load: list[float]) -> dict[str, float]:
        h2d, d2h = self._link_seconds(load)
        busy = {"compute": load[_COMPUTE]}
        if not self._device.is_host:
            busy |= {"link h2d": h2d, "link d2h": d2h}
        for index, (tier, (per_read, per_write, per_byte)) in enumerate(
            zip(self._machine.tiers, self._speeds, strict=True)
        ):
            if tier.backed_by is None:
                first = _TIERS + len(_KINDS) * index
                read, written, cpu = load[first : first + len(_KINDS)]
                copies = max(read * per_read, written * per_write, (read + written) * per_byte)
                busy[f"tier {tier.name}"] = cpu * per_byte + copies
        if self._has_exchanges:
            busy["peer links"], busy["network"] = self._exchange_seconds(load)
        if load[_SSD] or load[_SSD + 1]:
            busy["ssd read"], busy["ssd write"] = self._ssd_seconds(load)
        return busy
