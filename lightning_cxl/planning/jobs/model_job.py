"""`model_job`: what this engine would keep in host memory, move and compute for a torch model, before any byte exists.

Bytes of weights, masters, gradients and optimizer state come from the functions that the engine reserves them with
(`find_units`, `streamable`, `wanted_weights`, `wanted_tensors`, `gradients_at_once`), those of activations from the
engine's own offload in a dry run ([Note: Dry run]). So plan and run cannot drift apart. Nothing needs to have values:
the model may be on the meta device, and must be where it is to be run dry.

Device memory at the peak, or where the CPU computes, host memory that is not of the roles, is the sum of::

    weights and buffers that stay on the device   all but those that stream
    slots                                         NUM_SLOTS x the largest unit that streams
    activations, logits, loss                     the dry run's peak
    gradients on their way to the host            those of the two largest units or parameters outside of units

It leaves out what a dry run does not see, the driver's and CUDA libraries' own memory (about 0.5 GiB a process) and
what the allocator has cached.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_cxl.config import OffloadConfig
from lightning_cxl.inventory.held import (
    GRADIENTS,
    Held,
    TierOf,
    gradient_groups,
    held_tensors,
    parameter_bytes,
    units_of,
)
from lightning_cxl.inventory.wanted import Wanted
from lightning_cxl.inventory.workload import Workload
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.jobs.dry_run import DryRun, dry_run
from lightning_cxl.planning.jobs.job import Job, MemoryClass, Move
from lightning_cxl.planning.jobs.moves import Traffic, engine_moves
from lightning_cxl.streaming.activations import DEFAULT_MIN_BYTES
from lightning_cxl.streaming.params import NUM_SLOTS
from lightning_cxl.streaming.unit_weights import piece_nbytes


@dataclass(frozen=True, slots=True)
class ModelJob:
    """A job, and where its device memory comes from."""

    job: Job
    device_parts: Mapping[str, int]
    """Bytes by what they are for; `Job.device_bytes` is their sum."""
    notes: tuple[str, ...]
    """What is assumed or missing, one sentence each."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A dry run of one micro-batch, or an estimate of one."""

    run: DryRun
    note: str = ""
    """Why it is an estimate."""


def measure(
    model: nn.Module, config: OffloadConfig, load: Workload, compute_loss: Callable[[], torch.Tensor]
) -> Measured:
    """Run one micro-batch dry; a model that cannot be run without values gets an estimate.

    Args:
        model: on the meta device, in training mode and training precision.
        config: the user's choices.
        load: of one step.
        compute_loss: one micro-batch's forward on the meta device.
    """
    units = units_of(model, config)
    try:
        run = dry_run(
            model,
            units,
            compute_loss,
            min_bytes=DEFAULT_MIN_BYTES,
            mixed=load.mixed,
            computes_on_host=load.computes_on_host,
        )
    except Exception as error:  # the user's model may do anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return estimate(model, config, load, f"the model cannot be run without values ({reason})")
    return Measured(run)


def estimate(model: nn.Module, config: OffloadConfig, load: Workload, why: str) -> Measured:
    """Return what a micro-batch takes by rules of thumb.

    Args:
        model: on any device.
        config: the user's choices.
        load: of one step.
        why: it is not measured.
    """
    tokens = load.batch * load.sequence
    width = next((m.embedding_dim for m in model.modules() if isinstance(m, nn.Embedding)), 0)
    itemsize = 4 if load.mixed else next((p.element_size() for p in _known(model)), 4)
    nbytes = tokens * width * itemsize
    forward = 2.0 * tokens * sum(p.numel() for p in _known(model))
    note = (
        f"{why}: activations are estimated as batch x sequence x {width} per unit, flops as 2 per parameter and token, "
        f"and memory on the device is not known"
    )
    stored = {name: nbytes for name, _ in units_of(model, config)} if nbytes else {}
    return Measured(DryRun(stored, 0, forward, 3 * forward), note)


def model_job(
    name: str,
    model: nn.Module,
    config: OffloadConfig,
    load: Workload,
    measured: Measured,
    tier_of: TierOf = lambda _owner, _role: None,
    held: Held | None = None,
) -> ModelJob:
    """Return the job of a model that is trained.

    Args:
        name: of the job.
        model: in training mode and training precision; see the module's docstring.
        config: the user's choices.
        load: of one step.
        measured: what `measure` returned for them.
        tier_of: decorators and rules.
        held: what `held_tensors` returned for the run's own optimizers; for one AdamW when None.
    """
    run, notes = measured.run, [measured.note] if measured.note else []
    held = held_tensors(model, config, load, tier_of) if held is None else held
    traffic = _traffic(model, held, load)
    bytes_of = _bytes_of(held.all(), run, load, tier_of)
    parts = _device_parts(model, held, load, run)
    if load.num_devices > 1:
        notes.append(f"planned as data parallel on {load.num_devices} devices, of which this version drives one")
    n = load.num_micro_batches
    job = Job(
        name=name,
        classes=_classes(bytes_of, traffic, load),
        num_parameters=sum(p.numel() for p in _known(model)),
        num_units=max(1, len(units_of(model, config))),
        num_tokens=load.batch * load.sequence * n * load.num_devices,
        forward_flops=run.forward_flops * n,
        backward_flops=run.backward_flops * n,
        overlap=held.overlap,
        device_bytes=sum(parts.values()) if run.device_peak_bytes else None,
    )
    return ModelJob(job, parts, tuple(notes))


def job_of(
    name: str,
    model: nn.Module,
    config: OffloadConfig,
    load: Workload,
    compute_loss: Callable[[], torch.Tensor],
    tier_of: TierOf = lambda _owner, _role: None,
) -> Job:
    """Return the job alone; see `measure` and `model_job`."""
    return model_job(name, model, config, load, measure(model, config, load, compute_loss), tier_of).job


def _known(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose shape is known."""
    return [parameter for parameter in model.parameters() if not is_lazy(parameter)]


def _bytes_of(
    wanted: Iterable[Wanted], run: DryRun, load: Workload, tier_of: TierOf
) -> dict[tuple[TensorRole, str | None], int]:
    """Return bytes by role and the tier that is asked for."""
    found: dict[tuple[TensorRole, str | None], int] = {}
    for parameter, role, nbytes in wanted:
        key = role, tier_of(parameter, role)
        found[key] = found.get(key, 0) + nbytes * (load.num_devices if role is TensorRole.STAGING else 1)
    for unit, nbytes in run.stored_bytes.items():
        key = TensorRole.ACTIVATIONS, tier_of(unit, TensorRole.ACTIVATIONS)
        found[key] = found.get(key, 0) + nbytes * load.num_devices
    return found


def _traffic(model: nn.Module, held: Held, load: Workload) -> Traffic:
    weight_bytes = sum(each.nbytes for each in held.weights)
    all_bytes = sum(p.nbytes for p in _known(model))
    trained = sum(p.nbytes for p in _known(model) if p.requires_grad) / max(1, all_bytes)
    grads = [each for each in held.state if each.role in GRADIENTS]
    separate = [each.parameter for each in grads if each.role is TensorRole.MASTER_GRADS]
    on_host = [p for p in separate if load.computes_on_host or id(p) in held.unit_of]
    return Traffic(
        num_micro_batches=load.num_micro_batches,
        weight_bytes=weight_bytes,
        trained_bytes=round(weight_bytes * trained),
        weights_are_read=not on_host,
        grad_bytes=sum(each.nbytes for each in grads),
        arriving_bytes=sum(each.parameter.nbytes for each in grads),
        staged_bytes=held.staged.nbytes,
        written_back_bytes=sum(p.nbytes for p in separate) - sum(p.nbytes for p in on_host),
    )


def _classes(
    bytes_of: Mapping[tuple[TensorRole, str | None], int], traffic: Traffic, load: Workload
) -> tuple[MemoryClass, ...]:
    """Return a class per role and tier; each has its part of the role's moves."""
    total: dict[TensorRole, int] = {}
    for (role, _), nbytes in bytes_of.items():
        total[role] = total.get(role, 0) + nbytes
    classes = []
    for (role, tier), nbytes in bytes_of.items():
        each_device = role in (TensorRole.ACTIVATIONS, TensorRole.STAGING)
        moves = engine_moves(role, total[role] // (load.num_devices if each_device else 1), traffic)
        part = nbytes / max(1, total[role])
        own = tuple(Move(phase, kind, moved * part) for phase, kind, moved in moves)
        classes.append(MemoryClass(role=role, nbytes=nbytes, tier=tier, moves=own))
    return tuple(classes)


def _device_parts(model: nn.Module, held: Held, load: Workload, run: DryRun) -> dict[str, int]:
    """Return device memory at the peak by what it is for; see the module's docstring."""
    in_units = held.unit_of
    unit_bytes = [sum(piece_nbytes(module, group) for group in groups) for _, module, groups in held.pieces]
    buffers = sum(buffer.nbytes for buffer in model.buffers() if not is_lazy(buffer))
    rest = sum(p.nbytes for p in _known(model) if id(p) not in in_units)
    leaving = gradient_groups(held.state, in_units)[:2]  # one is copied, one is computed
    parts = {
        "weights that stay on the device": 0 if load.computes_on_host else rest + buffers,
        f"{NUM_SLOTS} slots for weights that stream": NUM_SLOTS * max(unit_bytes, default=0),
        "activations, logits and loss at their peak": run.device_peak_bytes,
        "gradients on their way to the host": 0 if load.computes_on_host else sum(map(parameter_bytes, leaving)),
    }
    return {name: nbytes for name, nbytes in parts.items() if nbytes}
