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

_ROUTER = (
    ("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk", "moe_k"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
)
"""Names in configs of transformers: how many experts compute a token, and of how many."""


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
    forward = 2.0 * tokens * _active_numel(model)
    note = (
        f"{why}: activations are estimated as batch x sequence x {width} per unit, flops as 2 per token and "
        f"parameter that it meets, and memory on the device is not known"
    )
    stored = {name: nbytes for name, _ in units_of(model, config)} if nbytes else {}
    return Measured(DryRun(stored, 0, forward, 3 * forward), note)


def _active_numel(model: nn.Module) -> float:
    """Return how many numbers of parameters a token meets: of experts, its router's choice."""
    total = sum(numel(p) for p in known_parameters(model))
    names = ((name.split("."), p) for name, p in model.named_parameters() if not is_lazy(p))
    experts = sum(numel(p) for name, p in names if "experts" in name)
    if not experts:
        return total
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    configs += [config.ffn_config for config in configs if hasattr(config, "ffn_config")]
    for config in configs:
        chosen, of = (max(getattr(config, name, None) or 0 for name in names) for names in _ROUTER)
        if chosen and of:
            return total - experts * (1 - min(chosen, of) / of)
    return total


def units_of(model: nn.Module, config: OffloadConfig) -> NamedUnits:
    """Return the units that are offloaded."""
    return find_units(model, config.units) if config.activation_offload else []


def known_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose shape is known."""
    return [parameter for parameter in model.parameters() if not is_lazy(parameter)]
