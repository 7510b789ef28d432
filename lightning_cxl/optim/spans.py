"""`SpanTable`: what one call of the Adam kernel is given, as rows of numbers."""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from lightning_cxl import _adam
from lightning_cxl.optim.blockwise import BLOCK_SIZE
from lightning_cxl.optim.formats import (
    GRAD_FORMATS,
    STATE_FORMATS,
    WEIGHTS_BF16,
    WEIGHTS_FP16,
    WEIGHTS_FP32,
    WEIGHTS_SPLIT,
    pack,
)
from lightning_cxl.optim.homes import Run, ThreadHomes
from lightning_cxl.optim.host_tensors import is_dense
from lightning_cxl.optim.layout import pieces
from lightning_cxl.optim.reference import AdamScalars
from lightning_cxl.optim.slot import KnownRow, Slot

_COMPUTE_FORMATS = {torch.bfloat16: WEIGHTS_BF16, torch.float16: WEIGHTS_FP16}


_GRAD, _KEY, _ROW = 3, 8, 10  # places in a row of what changes from step to step


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
    beside = None if compute is None else (compute.data_ptr(), compute.dtype, compute.shape, compute.stride())
    sizes = (parameter.numel(), grad.numel())  # whoever sets `.data` may cut either short
    return parameter.data_ptr(), parameter.dtype, parameter.stride(), grad.dtype, grad.stride(), *sizes, beside


def is_as_before(
    signature: tuple[object, ...], parameter: torch.Tensor, grad: torch.Tensor, compute: torch.Tensor | None
) -> bool:
    """Return whether a parameter and its gradient still have a `signature`."""
    ordinary = grad.is_cpu and grad.layout is torch.strided and not grad.is_neg()
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
            if update.parameter.is_contiguous() or is_dense(update.parameter):
                self._add_row(update, row)
            else:
                self._gapped.append((update, scalars))

    def _add_row(self, update: Update, row: int) -> None:
        slot, grad = update.slot, update.grad
        if slot.known is None or slot.known.signature != update.signature:
            slot.known = KnownRow(update.signature, _row(update))
        start = len(self._spans)
        self._spans.extend(slot.known.numbers)
        self._spans[start + _GRAD], self._spans[start + _KEY] = grad.data_ptr(), update.key
        self._spans[start + _ROW] = row
        if self._homes is not None:
            if slot.runs is None:
                slot.runs = self._homes.runs(slot.momentum.flat)
            whole = self._spans[start:]
            del self._spans[start:]
            for run in slot.runs:
                self._spans.extend(_part(whole, run, grad.element_size(), slot.momentum.flat.element_size()))

    def run(self, num_threads: int, isa: str) -> None:
        """Update everything in the table."""
        _adam.update(self._spans, self._scalars, num_threads, isa, None if self._homes is None else self._homes.cpus)
        for update, scalars in self._gapped:
            _update_gapped(update, scalars, isa)


def _row(update: Update) -> tuple[int, ...]:
    """Return the numbers of a dense parameter's span; gradient, key and row of scalars are filled in at every step."""
    slot, momentum, variance = update.slot, update.slot.momentum, update.slot.variance
    weights, addresses = _weights(update.parameter, update.compute, slot.remainder)
    scales = [0 if moment.scales is None else moment.scales.data_ptr() for moment in (momentum, variance)]
    state = (momentum.flat.data_ptr(), variance.flat.data_ptr(), *scales)
    formats = pack(GRAD_FORMATS[update.grad.dtype], weights, STATE_FORMATS[slot.precision])
    return (*addresses, 0, *state, 0, slot.numel, 0, formats, 0, 0)


def _part(whole: Sequence[int], run: Run, grad_bytes: int, state_bytes: int) -> list[int]:
    """Return the span of one run of a row's elements."""
    strides = (4.0, 2.0, 2.0, grad_bytes, state_bytes, state_bytes, 4 / BLOCK_SIZE, 4 / BLOCK_SIZE)
    addresses = [at + int(run.begin * stride) if at else 0 for at, stride in zip(whole, strides, strict=False)]
    key, _, row, formats = whole[8:12]
    return [*addresses, key, run.end - run.begin, row, formats, run.home, run.begin]


def _weights(
    parameter: torch.Tensor, compute: torch.Tensor | None, remainder: torch.Tensor | None
) -> tuple[int, tuple[int, int, int]]:
    """Return the format of the weights, and the addresses of weights, compute weights and remainders."""
    address = parameter.data_ptr()
    if remainder is not None:
        return WEIGHTS_SPLIT, (0, address, remainder.data_ptr())
    if compute is not None:
        return _COMPUTE_FORMATS[compute.dtype], (address, compute.data_ptr(), 0)
    return WEIGHTS_FP32, (address, 0, 0)


def _update_gapped(update: Update, scalars: AdamScalars, isa: str) -> None:
    """Update a parameter with gaps in memory, through a dense copy of a piece at a time. Its state is float32."""
    parameter, grad, slot, compute = update[:4]
    dense = [grad, slot.momentum.values, slot.variance.values]
    dense += [tensor for tensor in (compute, slot.remainder) if tensor is not None]
    for home, *parts in zip(pieces(parameter), *map(pieces, dense), strict=True):
        copy = home.contiguous()
        weights, addresses = _weights(
            copy, None if compute is None else parts[3], None if slot.remainder is None else parts[-1]
        )
        state = (parts[1].data_ptr(), parts[2].data_ptr(), 0, 0)
        formats = pack(GRAD_FORMATS[grad.dtype], weights, STATE_FORMATS["fp32"])
        span = array("Q", (*addresses, parts[0].data_ptr(), *state, 0, copy.numel(), 0, formats, 0, 0))
        _adam.update(span, array("f", scalars), 1, isa)
        home.copy_(copy)
