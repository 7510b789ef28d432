"""`state_tensors`: masters, gradients and optimizer state of every parameter that an optimizer updates."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_cxl.config import OffloadConfig
from lightning_cxl.inventory.foreign_state import num_state_tensors
from lightning_cxl.inventory.tensors import HostTensor
from lightning_cxl.optim.masters import master_dtype, needs_master
from lightning_cxl.optim.number_formats import MasterForm
from lightning_cxl.optim.precisions import Precisions
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.shards import local

_HALF = (torch.bfloat16, torch.float16)


def state_tensors(
    optimizers: Iterable[Optimizer],
    precisions: Precisions,
    config: OffloadConfig,
    *,
    accumulates: bool,
    on_host: Callable[[torch.Tensor], bool],
) -> list[HostTensor]:
    """Return masters, gradients and, for CPUAdam, its state; each parameter and role once.

    Master weights of one parameter may be two tensors: a copy, and in `CPUAdam`'s state their lower halves.

    Args:
        optimizers: as the user made them.
        precisions: in which masters and moments will be kept; has considered the optimizers.
        config: of the run.
        accumulates: several micro-batches are added up before a step.
        on_host: whether a parameter will be in host memory between steps.
    """
    found: dict[tuple[int, TensorRole, bool], HostTensor] = {}
    for optimizer in optimizers:
        for group, parameter in ((each, p) for each in optimizer.param_groups for p in each["params"]):
            if is_lazy(parameter):
                continue
            form = precisions.form_for(optimizer, parameter)
            separate = needs_master(parameter, master_dtype(parameter, form), on_host=on_host(parameter))
            half_sums = config.accumulate == "bf16"
            bytes_of = _master_and_grad(parameter, form, separate, half_sums=half_sums, accumulates=accumulates)
            moment = precisions.moment_bytes(optimizer, parameter)
            in_state = {TensorRole.MASTER_WEIGHTS: _lower_half_bytes(parameter, form)}
            if moment or not parameter.requires_grad:
                in_state |= {TensorRole.MOMENTUM: moment, TensorRole.VARIANCE: moment}
            else:
                bytes_of[TensorRole.MOMENTUM] = _foreign_bytes(optimizer, precisions, group, parameter)
            for is_state, sizes in ((False, bytes_of), (True, in_state)):
                for role, nbytes in sizes.items():
                    if nbytes:
                        found[id(parameter), role, is_state] = HostTensor(parameter, role, nbytes, in_state=is_state)
    return list(found.values())


def _lower_half_bytes(parameter: torch.Tensor, form: MasterForm | None) -> int:
    return 2 * local(parameter).numel() if master_dtype(parameter, form) in _HALF and parameter.requires_grad else 0


def _foreign_bytes(optimizer: Optimizer, precisions: Precisions, group: dict[str, Any], parameter: torch.Tensor) -> int:
    """Return the bytes of the state that a torch optimizer makes itself at its first step; all of it is MOMENTUM."""
    if precisions.becomes_cpu_adam(optimizer):
        return 0
    itemsize = master_dtype(parameter, precisions.form_for(optimizer, parameter)).itemsize
    return num_state_tensors(optimizer, group) * local(parameter).numel() * itemsize


def _master_and_grad(
    parameter: torch.Tensor, form: MasterForm | None, separate: bool, *, half_sums: bool, accumulates: bool
) -> dict[TensorRole, int]:
    numel, dtype = local(parameter).numel(), master_dtype(parameter, form)
    master_bytes = numel * dtype.itemsize if separate else 0
    sums = dtype in _HALF or form is not None
    wide = accumulates and parameter.dtype in _HALF and not (half_sums and parameter.dtype is torch.bfloat16)
    grad_dtype = (torch.float32 if wide else parameter.dtype) if sums else dtype
    grad_role = TensorRole.MASTER_GRADS if separate else TensorRole.COMPUTE_GRADS
    grad_bytes = numel * grad_dtype.itemsize if parameter.requires_grad else 0
    return {TensorRole.MASTER_WEIGHTS: master_bytes, grad_role: grad_bytes}
