"""Hyper-parameters of a parameter group: what CPUAdam accepts, and the numbers of one step made from them."""

from collections.abc import Mapping
from typing import Any

import torch

from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.optim.reference import AdamScalars


def scalars_of(group: Mapping[str, Any], step: float, grad_scale: float) -> AdamScalars:
    """Return what the kernel needs for a group at a step."""
    return AdamScalars.at_step(
        step,
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
        grad_scale=grad_scale,
    )


def check_options(group: Mapping[str, Any]) -> None:
    """Refuse torch's options that the kernel does not have."""
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(option):
            raise UnsupportedError(
                f"CPUAdam has no `{option}`: set `{option}=False`, or `cpu_adam=False` to run torch's optimizer itself"
            )


def check_ranges(group: Mapping[str, Any]) -> None:
    """Refuse hyper-parameters that torch refuses too."""
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if (isinstance(value, torch.Tensor) and value.numel() != 1) or not float(value) >= 0.0:
            raise ConfigError(f"`{name}` must be one number, at least 0, got {value}")
    betas = group["betas"]
    if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ConfigError(f"`betas` must be two numbers in [0, 1), got {betas}")
