"""`state_tensors`: masters, gradients and optimizer state of every parameter that an optimizer updates."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop

from lightning_cxl.config import OffloadConfig
from lightning_cxl.inventory.tensors import HostTensor
from lightning_cxl.optim.cpu_adam import Precisions
from lightning_cxl.optim.masters import master_dtype, needs_master
from lightning_cxl.optim.number_formats import MasterForm
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.shards import local

_FIXED: dict[type[Optimizer], int] = {Adadelta: 2, Adagrad: 1, Adamax: 2, ASGD: 1, NAdam: 2, RAdam: 2, Rprop: 2}


def num_state_tensors(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """Return how many tensors of a parameter's size its state has; 0 for classes that are not torch's.

    Adafactor keeps less than one, LBFGS a history that is shared by all; both count as 0 as well.
    """
    if isinstance(optimizer, Adam):  # AdamW too
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, SGD):
        return 1 if group.get("momentum") else 0
    if isinstance(optimizer, RMSprop):
        return 1 + bool(group.get("momentum")) + bool(group.get("centered"))
    return next((count for kind, count in _FIXED.items() if isinstance(optimizer, kind)), 0)


def sensitive_parameters(model: nn.Module) -> dict[Tensor, None]:
    """Return the parameters of embeddings and norms, as keys: told apart by identity, also in a copy or a pickle.

    As bitsandbytes recommends (arXiv:2110.02861, section 2.3): rows of an embedding that are rarely used have gradients
    of another size than their neighbours in a block. Norms are told by their class name, as every model family
    has its own.
    """
    return {
        parameter: None
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Norm" in type(module).__name__
        for parameter in module.parameters(recurse=False)
    }


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
        precisions: in which masters and moments will be kept; has considered the optimizers.
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
