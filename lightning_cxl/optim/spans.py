"""`SpanTable`: what one call of the Adam kernel is given, as rows of numbers."""

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import torch

from lightning_cxl import _adam
from lightning_cxl.memory.host_tensors import is_dense
from lightning_cxl.optim.eight_bit import BLOCK_SIZE
from lightning_cxl.optim.homes import Run, ThreadHomes
from lightning_cxl.optim.hyperparameters import AdamScalars
from lightning_cxl.optim.layout import pieces
from lightning_cxl.optim.number_formats import (
    GRAD_FORMATS,
    STATE_FORMATS,
    WEIGHTS_BF16,
    WEIGHTS_FP16,
    WEIGHTS_FP32,
    WEIGHTS_SPLIT,
    StatePrecision,
    pack,
)
from lightning_cxl.optim.slot import KnownRow, Slot

_COMPUTE_FORMATS = {torch.bfloat16: WEIGHTS_BF16, torch.float16: WEIGHTS_FP16}


class SpanRow(NamedTuple):
    """One span as the kernel takes it: the fields of ``struct adam_span``, in order."""

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
    home: int
    first: int


_GRAD, _KEY, _ROW, _HOME = map(SpanRow._fields.index, ("grads", "key", "row", "home"))  # these change between steps


class Update(NamedTuple):
    """One parameter's part of a step."""

    parameter: torch.Tensor
    grad: torch.Tensor
    slot: Slot
    compute: torch.Tensor | None
    """16-bit compute weights to write beside a float32 parameter."""
    signature: tuple[object, ...]
    """Equal where the layout, formats and addresses are those of an earlier step; see `signature_of`."""
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


class SpanTable:
    """Rows of spans, and the rows of scalars that they refer to.

    Args:
        homes: which threads take which part; None where all are near to all memory.
    """

    def __init__(self, homes: ThreadHomes | None = None) -> None:
        self._homes = homes
        self._spans = array("Q")
        self._scalars = array("f")
        self._gapped: list[tuple[Update, AdamScalars]] = []

    def add(self, updates: Iterable[Update], scalars: AdamScalars) -> None:
        """Add parameters to be updated with the same scalars."""
        row = len(self._scalars) // _adam.SCALAR_FIELDS
        self._scalars.extend(scalars)
        for update in updates:
            known = update.slot.known  # only of dense ones
            if (known is not None and known.signature is update.signature) or is_dense(update.parameter):
                self._add_row(update, row)
            else:
                self._gapped.append((update, scalars))

    def _add_row(self, update: Update, scalars_row: int) -> None:
        slot, grad = update.slot, update.grad
        if slot.known is None or slot.known.signature != update.signature:
            row = _pack_row(
                update.parameter,
                update.compute,
                slot.remainder,
                grad,
                (slot.momentum.flat, slot.variance.flat),
                (slot.momentum.scales, slot.variance.scales),
                slot.precision,
            )
            slot.known = KnownRow(update.signature, row)
        start = len(self._spans)
        self._spans.extend(slot.known.numbers)
        self._spans[start + _GRAD], self._spans[start + _KEY] = grad.data_ptr(), update.key
        self._spans[start + _ROW] = scalars_row
        if self._homes is not None:
            if slot.runs is None:
                slot.runs = self._homes.runs(slot.momentum.flat)
            if len(slot.runs) == 1:
                self._spans[start + _HOME] = slot.runs[0].home
                return
            whole = SpanRow(*self._spans[start:])
            del self._spans[start:]
            for run in slot.runs:
                self._spans.extend(_part(whole, run, grad.element_size(), slot.momentum.values.element_size()))

    def run(self, num_threads: int, isa: str) -> None:
        """Update everything in the table."""
        _adam.update(self._spans, self._scalars, num_threads, isa, None if self._homes is None else self._homes.cpus)
        for update, scalars in self._gapped:
            _update_gapped(update, scalars, isa)


def _pack_row(
    weights: torch.Tensor,
    compute: torch.Tensor | None,
    remainder: torch.Tensor | None,
    grad: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    state: StatePrecision = "fp32",
) -> SpanRow:
    """Return the span of dense tensors; what is the caller's to fill in is 0."""
    if remainder is not None:  # the parameter is the upper half
        form, addresses = WEIGHTS_SPLIT, (0, weights.data_ptr(), remainder.data_ptr())
    elif compute is not None:
        form, addresses = _COMPUTE_FORMATS[compute.dtype], (weights.data_ptr(), compute.data_ptr(), 0)
    else:
        form, addresses = WEIGHTS_FP32, (weights.data_ptr(), 0, 0)
    return SpanRow(
        *addresses,
        grads=grad.data_ptr(),
        momentum=moments[0].data_ptr(),
        variance=moments[1].data_ptr(),
        momentum_scale=0 if scales[0] is None else scales[0].data_ptr(),
        variance_scale=0 if scales[1] is None else scales[1].data_ptr(),
        key=0,
        numel=weights.numel(),
        row=0,
        formats=pack(GRAD_FORMATS[grad.dtype], form, STATE_FORMATS[state]),
        home=0,
        first=0,
    )


def _part(whole: SpanRow, run: Run, grad_bytes: int, state_bytes: int) -> SpanRow:
    """Return the span of one run of a row's elements; it begins with a block of scales."""

    def at(address: int, element_bytes: int) -> int:
        return address + run.begin * element_bytes if address else 0

    def scale_at(address: int) -> int:
        return address + run.begin // BLOCK_SIZE * 4 if address else 0

    return whole._replace(
        weights=at(whole.weights, 4),
        compute=at(whole.compute, 2),
        rest=at(whole.rest, 2),
        grads=at(whole.grads, grad_bytes),
        momentum=at(whole.momentum, state_bytes),
        variance=at(whole.variance, state_bytes),
        momentum_scale=scale_at(whole.momentum_scale),
        variance_scale=scale_at(whole.variance_scale),
        numel=run.end - run.begin,
        home=run.home,
        first=run.begin,
    )


def _update_gapped(update: Update, scalars: AdamScalars, isa: str) -> None:
    """Update a parameter with gaps in memory, through a dense copy of a piece at a time. Its state is float32."""
    parameter, grad, slot, compute = update[:4]
    assert slot.precision == "fp32", "`Slot.check` refuses gaps with other state"
    dense = [grad, slot.momentum.values, slot.variance.values]
    dense += [tensor for tensor in (compute, slot.remainder) if tensor is not None]
    for home, part, momentum, variance, *rest in zip(pieces(parameter), *map(pieces, dense), strict=True):
        copy = home.contiguous()
        row = _pack_row(
            copy,
            None if compute is None else rest[0],
            None if slot.remainder is None else rest[-1],
            part,
            (momentum, variance),
        )
        _adam.update(array("Q", row), array("f", scalars), 1, isa)
        home.copy_(copy)
