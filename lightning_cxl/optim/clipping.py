"""Clipping by the total norm, folded into the step: sums of squares, the factor, and where an optimizer keeps it."""

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from lightning_cxl.memory.host_tensors import is_dense, is_ordinary
from lightning_cxl.native import _grads
from lightning_cxl.optim.number_formats import GRAD_FORMATS
from lightning_cxl.optim.param_groups import plain
from lightning_cxl.shards import local, sums_over_processes


class Meter(Protocol):
    """Measures gradients."""

    def sums_of(self, parameters: Iterable[torch.Tensor]) -> list[float]:
        """Return the sum of squares of each gradient that `parameters` have."""


class ReadingMeter:
    """The meter of an optimizer on its own: reads every gradient, as nobody tells what happened to it since."""

    def __init__(self, num_threads: int, isa: str) -> None:
        self._num_threads = num_threads
        self._isa = isa

    def sums_of(self, parameters: Iterable[torch.Tensor]) -> list[float]:
        """Return the sum of squares of each gradient that `parameters` have."""
        return sums_of_squares(gradients(parameters), self._num_threads, self._isa)


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


class GradScale:
    """Gives an optimizer `grad_scale`, and clipping that sets it.

    It is kept in a list, so that setting it through a wrapper that only passes attributes on, as Lightning's does, sets
    the optimizer's own.
    """

    _scale: list[float]
    param_groups: list[dict[str, Any]]
    meter: Meter
    """Measures gradients: the optimizer's own, or in a run the one that measures them as they arrive."""

    @property
    def grad_scale(self) -> float:
        """Factor of the gradients in the next step, which sets it back to 1."""
        return self._scale[0]

    @grad_scale.setter
    def grad_scale(self, value: float) -> None:
        self._scale[0] = value

    def clip_grad_norm_(self, max_norm: float, *, scale: float = 1.0) -> float:
        """Let the next step clip the gradients to a total norm, without a sweep of its own.

        The norm comes from one read of those gradients that were not measured when they arrived; the step multiplies by
        the factor as it reads them. ``.grad`` keeps the values from before. Of several calls before a step the last
        one counts.

        Args:
            scale: factor that the gradients still need, such as 1 / loss scale; the step applies it too.

        Returns:
            The norm before clipping, of the scaled gradients; infinite or NaN if an element is.
        """
        norm, factor = clip_factor(self._whole_sums(), max_norm, scale)
        # set, not multiplied: the step that a factor of before was for may have been left out
        self.grad_scale = scale * factor
        return norm

    def drop_stale_scale(self) -> None:
        """Forget a factor that is infinite or not a number, unless these gradients are: it was for others."""
        if math.isfinite(self.grad_scale):
            return
        if all(map(math.isfinite, self._whole_sums())):
            self.grad_scale = 1.0

    def _whole_sums(self) -> list[float]:
        parameters = self._parameters()
        return sums_over_processes(gradients(parameters), self.meter.sums_of(parameters))

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in plain(group["params"])]
