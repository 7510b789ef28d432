"""`SpanTable`: what one call of the Adam kernel is given, as rows of numbers."""

from array import array
from collections.abc import Iterable
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
from lightning_cxl.optim.homes import ThreadHomes
from lightning_cxl.optim.host_tensors import is_dense
from lightning_cxl.optim.layout import pieces
from lightning_cxl.optim.reference import AdamScalars
from lightning_cxl.optim.slot import Slot

_COMPUTE_FORMATS = {torch.bfloat16: WEIGHTS_BF16, torch.float16: WEIGHTS_FP16}


class Update(NamedTuple):
    """One parameter's part of a step."""

    parameter: torch.Tensor
    grad: torch.Tensor
    slot: Slot
    compute: torch.Tensor | None
    """16-bit compute weights to write beside a float32 parameter."""
    key: int = 0
    """Of stochastic rounding."""


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
            if is_dense(update.parameter):
                self._add_row(update, row)
            else:
                self._gapped.append((update, scalars))

    def _add_row(self, update: Update, row: int) -> None:
        parameter, grad, slot, compute, key = update
        momentum, variance = slot.momentum, slot.variance
        weights, addresses = _weights(parameter, compute, slot.remainder)
        state = (
            momentum.flat.data_ptr(),
            variance.flat.data_ptr(),
            0 if momentum.scales is None else momentum.scales.data_ptr(),
            0 if variance.scales is None else variance.scales.data_ptr(),
        )
        formats = pack(GRAD_FORMATS[grad.dtype], weights, STATE_FORMATS[slot.precision])
        tensors = (*addresses, grad.data_ptr(), *state)
        if self._homes is None:
            self._spans.extend((*tensors, key, slot.numel, row, formats, 0, 0))
            return
        if slot.runs is None:
            slot.runs = self._homes.runs(momentum.flat)
        state_bytes = momentum.flat.element_size()
        strides = (4.0, 2.0, 2.0, grad.element_size(), state_bytes, state_bytes, 4 / BLOCK_SIZE, 4 / BLOCK_SIZE)
        for begin, end, home in slot.runs:
            moved = [at + int(begin * stride) if at else 0 for at, stride in zip(tensors, strides, strict=True)]
            self._spans.extend((*moved, key, end - begin, row, formats, home, begin))

    def run(self, num_threads: int, isa: str) -> None:
        """Update everything in the table."""
        _adam.update(self._spans, self._scalars, num_threads, isa, None if self._homes is None else self._homes.cpus)
        for update, scalars in self._gapped:
            _update_gapped(update, scalars, isa)


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
    parameter, grad, slot, compute, _ = update
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
