"""Inputs of units that one micro-batch stores on the host: measured in a dry run, or estimated."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_cxl.config import OffloadConfig
from lightning_cxl.inventory.dry_run import DryRun, dry_run
from lightning_cxl.inventory.workload import Workload
from lightning_cxl.streaming.activations import DEFAULT_MIN_BYTES
from lightning_cxl.streaming.quantised import numel
from lightning_cxl.streaming.units import NamedUnits, find_units


@dataclass(frozen=True, slots=True)
class Measured:
    """A dry run of one micro-batch, or an estimate of one."""

    run: DryRun
    note: str = ""
    """Why it is an estimate."""


def measure(
    model: nn.Module, config: OffloadConfig, workload: Workload, compute_loss: Callable[[], torch.Tensor]
) -> Measured:
    """Run one micro-batch dry; a model that cannot be run without values gets an estimate.

    Args:
        model: on the meta device, in training mode and training precision.
        config: the user's choices.
        workload: of one step.
        compute_loss: one micro-batch's forward on the meta device.
    """
    units = units_of(model, config)
    try:
        run = dry_run(
            model,
            units,
            compute_loss,
            min_bytes=DEFAULT_MIN_BYTES,
            mixed=workload.mixed,
            computes_on_host=workload.computes_on_host,
        )
    except Exception as error:  # the user's model may do anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return estimate(model, config, workload, f"the model cannot be run without values ({reason})")
    return Measured(run)


def estimate(model: nn.Module, config: OffloadConfig, workload: Workload, why: str) -> Measured:
    """Return what a micro-batch takes by rules of thumb.

    Args:
        model: on any device.
        config: the user's choices.
        workload: of one step.
        why: it is not measured.
    """
    tokens = workload.batch * workload.sequence
    width = next((m.embedding_dim for m in model.modules() if isinstance(m, nn.Embedding)), 0)
    itemsize = 4 if workload.mixed else next((p.element_size() for p in known_parameters(model)), 4)
    nbytes = tokens * width * itemsize
    forward = 2.0 * tokens * sum(numel(p) for p in known_parameters(model))
    note = (
        f"{why}: activations are estimated as batch x sequence x {width} per unit, flops as 2 per parameter and token, "
        f"and memory on the device is not known"
    )
    stored = {name: nbytes for name, _ in units_of(model, config)} if nbytes else {}
    return Measured(DryRun(stored, 0, forward, 3 * forward), note)


def units_of(model: nn.Module, config: OffloadConfig) -> NamedUnits:
    """Return the units that are offloaded."""
    return find_units(model, config.units) if config.activation_offload else []


def known_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose shape is known."""
    return [parameter for parameter in model.parameters() if not is_lazy(parameter)]
