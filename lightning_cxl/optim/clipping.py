"""Clipping by the total norm: sums of squares of gradients, and the factor that the step applies."""

import math
import sys
from array import array
from collections.abc import Iterable, Sequence

import torch

from lightning_cxl.memory.host_tensors import is_dense, is_ordinary
from lightning_cxl.native import _grads
from lightning_cxl.optim.number_formats import GRAD_FORMATS
from lightning_cxl.shards import local


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def sums_of_squares(grads: Sequence[torch.Tensor], num_threads: int, isa: str) -> list[float]:
    """Return the sum of squares of each tensor, finite if and only if every element is, in one read of all of them.

    Of tensors that are cut over processes it is that of the shard here.

    Of host tensors without gaps in float32, bfloat16 or float16 the sum depends on the values only, neither on threads
    nor `isa`; of others torch computes it.
    """
    grads = [local(grad) for grad in grads]
    readable = [kernel_can_read(grad) for grad in grads]
    rows = array("Q")
    for grad, can_read in zip(grads, readable, strict=True):
        if can_read:
            grad_format = GRAD_FORMATS[grad.dtype]
            rows.extend((grad.data_ptr(), 0, grad.numel(), grad_format, grad_format, 0))
    results = array("d", bytes(8 * sum(readable)))
    if results:
        _grads.measure(rows, results, num_threads, isa)
    measured = iter(results)
    return [next(measured) if can_read else _sum_by_torch(grad) for grad, can_read in zip(grads, readable, strict=True)]


def kernel_can_read(grad: torch.Tensor) -> bool:
    """Return whether the kernels of gradients can walk the memory of `grad`."""
    return grad.dtype in GRAD_FORMATS and is_ordinary(grad) and is_dense(grad)


def _sum_by_torch(grad: torch.Tensor) -> float:
    values = grad.coalesce().values() if grad.is_sparse else grad
    total = float(torch.linalg.vector_norm(values.detach().double())) ** 2
    if math.isfinite(total) or not bool(values.isfinite().all()):
        return total
    return sys.float_info.max  # finite float64 numbers whose squares are not


def clip_factor(sums: list[float], max_norm: float, scale: float) -> tuple[float, float]:
    """Return the norm of gradients times `scale`, and the factor that brings it down to `max_norm` (at most 1).

    As in ``torch.nn.utils.clip_grad_norm_``; a norm that is not a number gives such a factor.
    """
    norm = math.sqrt(math.fsum(sums)) * scale if all(map(math.isfinite, sums)) else sum(sums)
    factor = max_norm / (norm + 1e-6)
    return norm, 1.0 if factor > 1.0 else factor
