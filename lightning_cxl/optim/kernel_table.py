"""`KernelTable`: what one call of the Adam kernel is given, as rows of numbers."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import torch

from lightning_cxl.memory.host_tensors import is_dense
from lightning_cxl.native import _adam
from lightning_cxl.optim.eight_bit import BLOCK_SIZE
from lightning_cxl.optim.hyperparameters import AdamScalars
from lightning_cxl.optim.number_formats import (
    GRAD_FORMATS,
    STATE_FORMATS,
    WEIGHTS_BF16,
    WEIGHTS_FP16,
    WEIGHTS_FP32,
    WEIGHTS_SPLIT,
    pack,
)
from lightning_cxl.optim.parameter_state import KnownRow, ParameterState
from lightning_cxl.optim.state_visits import Visit
from lightning_cxl.optim.threads import Stretch, ThreadTeams

_COMPUTE_FORMATS = {torch.bfloat16: WEIGHTS_BF16, torch.float16: WEIGHTS_FP16}


class KernelRow(NamedTuple):
    """Elements that are updated alike, as the kernel takes them: the fields of ``struct adam_span``, in order."""

    weights: int
    compute: int
    rest: int
    grads: int
    momentum: int
    variance: int
    momentum_scale: int
    variance_scale: int
    key: int
    numel: int
    row: int
    formats: int
    team: int
    first: int


_GRAD, _KEY, _ROW, _TEAM = map(KernelRow._fields.index, ("grads", "key", "row", "team"))  # these change between steps
_KEPT = tuple(
    map(
        KernelRow._fields.index,
        ("weights", "compute", "rest", "momentum", "variance", "momentum_scale", "variance_scale"),
    )
)
"""Addresses of what may lie on SSD."""


class Update(NamedTuple):
    """One parameter's part of a step: of the shard that this process holds."""

    parameter: torch.Tensor
    grad: torch.Tensor
    kept: ParameterState
    compute: torch.Tensor | None
    """16-bit compute weights to write beside a float32 parameter."""
    signature: tuple[object, ...]
    """Equal where the layout, formats and addresses are those of an earlier step; see `signature_of`."""
    written: tuple[torch.Tensor, ...]
    """The parameter of the optimizer, and its compute weights where there are some: cut over processes or not."""
    key: int = 0
    """Of stochastic rounding."""


def signature_of(parameter: torch.Tensor, grad: torch.Tensor, compute: torch.Tensor | None) -> tuple[object, ...]:
    """Return what must be as it was for a parameter's checks and row of numbers to be right again."""
    beside = None
    if compute is not None:
        beside = compute.data_ptr(), compute.dtype, compute.shape, compute.stride(), compute.is_neg()
    # whoever sets `.data` may change any of it
    return (
        parameter.data_ptr(),
        parameter.dtype,
        parameter.shape,
        parameter.stride(),
        parameter.is_neg(),
        grad.dtype,
        grad.numel(),
        grad.stride(),
        beside,
    )


def is_as_before(
    signature: tuple[object, ...], parameter: torch.Tensor, grad: torch.Tensor, compute: torch.Tensor | None
) -> bool:
    """Return whether a parameter and its gradient still have a `signature`."""
    ordinary = grad.is_cpu and grad.layout is torch.strided and not grad.is_neg() and grad.data_ptr() != 0
    return ordinary and signature == signature_of(parameter, grad, compute)


class KernelTable:
    """Rows of parameters, and the rows of scalars that they refer to.

    Args:
        teams: which threads take which part; None where all are near to all memory.
        visit: where state and weights are now that are not in memory otherwise; None where all is in memory.
    """

    def __init__(self, teams: ThreadTeams | None = None, visit: Visit | None = None) -> None:
        self._teams = teams
        self._visit = visit
        self._rows = array("Q")
        self._scalars = array("f")
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters with gaps, and what is updated

    def add(self, updates: Iterable[Update], scalars: AdamScalars) -> None:
        """Add parameters to be updated with the same scalars."""
        scalars_row = len(self._scalars) // _adam.SCALAR_FIELDS
        self._scalars.extend(scalars)
        for update in updates:
            known = update.kept.known
            if known is None or known.signature is not update.signature:
                known = self._describe(update)
            start = len(self._rows)
            self._rows.extend(known.numbers)
            self._rows[start + _GRAD], self._rows[start + _KEY] = update.grad.data_ptr(), update.key
            self._rows[start + _ROW] = scalars_row
            stretches = known.stretches
            if self._visit is not None:
                for field in _KEPT:
                    self._rows[start + field] = self._visit.moved(self._rows[start + field])
                stretches = self._stretches(update.kept)  # of a slot, which is another one each time
            if stretches is None:
                continue
            if len(stretches) == 1:
                self._rows[start + _TEAM] = stretches[0].team
                continue
            whole = KernelRow(*self._rows[start:])
            del self._rows[start:]
            state_bytes = update.kept.momentum.values.element_size()
            for stretch in stretches:
                self._rows.extend(_part(whole, stretch, update.grad.element_size(), state_bytes))

    def _stretches(self, kept: ParameterState) -> list[Stretch] | None:
        if self._teams is None:
            return None
        momentum = kept.momentum.flat
        return self._teams.stretches(momentum if self._visit is None else self._visit.at_slot(momentum))

    def _describe(self, update: Update) -> KnownRow:
        """Return the row of a parameter, which knows it from now on if it was not copied."""
        weights, kept = update.parameter, update.kept
        if not is_dense(weights):
            weights = weights.detach().contiguous()
            self._copies.append((update.parameter, weights))
        stretches = self._stretches(kept)
        known = KnownRow(update.signature, _pack(update, weights), stretches)
        if weights is update.parameter:
            kept.known = known
        return known

    def run(self, num_threads: int, isa: str) -> None:
        """Update everything in the table."""
        _adam.update(self._rows, self._scalars, num_threads, isa, None if self._teams is None else self._teams.cpus)
        for parameter, updated in self._copies:
            parameter.copy_(updated)


def _pack(update: Update, weights: torch.Tensor) -> KernelRow:
    """Return the row of an update of dense `weights`; what differs from step to step is 0."""
    kept, compute = update.kept, update.compute
    if kept.remainder is not None:  # the parameter is the upper half
        form, addresses = WEIGHTS_SPLIT, (0, weights.data_ptr(), kept.remainder.data_ptr())
    elif compute is not None:
        form, addresses = _COMPUTE_FORMATS[compute.dtype], (weights.data_ptr(), compute.data_ptr(), 0)
    else:
        form, addresses = WEIGHTS_FP32, (weights.data_ptr(), 0, 0)
    momentum, variance = kept.momentum, kept.variance
    return KernelRow(
        *addresses,
        grads=0,
        momentum=momentum.values.data_ptr(),
        variance=variance.values.data_ptr(),
        momentum_scale=0 if momentum.scales is None else momentum.scales.data_ptr(),
        variance_scale=0 if variance.scales is None else variance.scales.data_ptr(),
        key=0,
        numel=weights.numel(),
        row=0,
        formats=pack(GRAD_FORMATS[update.grad.dtype], form, STATE_FORMATS[kept.precision]),
        team=0,
        first=0,
    )


def _part(whole: KernelRow, stretch: Stretch, grad_bytes: int, state_bytes: int) -> KernelRow:
    """Return the row of one stretch of a row's elements; it begins with a block of scales."""

    def at(address: int, element_bytes: int) -> int:
        return address + stretch.begin * element_bytes if address else 0

    def scale_at(address: int) -> int:
        return address + stretch.begin // BLOCK_SIZE * 4 if address else 0

    return whole._replace(
        weights=at(whole.weights, 4),
        compute=at(whole.compute, 2),
        rest=at(whole.rest, 2),
        grads=at(whole.grads, grad_bytes),
        momentum=at(whole.momentum, state_bytes),
        variance=at(whole.variance, state_bytes),
        momentum_scale=scale_at(whole.momentum_scale),
        variance_scale=scale_at(whole.variance_scale),
        numel=stretch.end - stretch.begin,
        team=stretch.team,
        first=stretch.begin,
    )
