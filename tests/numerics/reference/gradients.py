"""Measuring, copying and accumulating gradients in plain torch: the definition of the compiled kernels, bit for bit.

A sum of squares is defined down to the order of its additions, so that it depends on nothing but the values: not on
the instruction set, the threads, the format, or what else is in the call.
"""

import torch
from torch.nn.functional import pad

from tests.numerics.reference.rounding import random_bits, round_stochastic

PIECE = 262144
"""Elements summed before sums are."""
QUARTERS = 4
"""Parts of a piece that are summed on their own; each is a whole number of rows."""
LANES = 32


def sum_of_squares(values: torch.Tensor) -> float:
    """Return the sum of squares; finite if and only if every element is.

    Squares of float32 are exact in double. Rows of `LANES` elements are added one after the other, then the lanes by
    halves, then the quarters of a piece in order, then the pieces in order.
    """
    exact = values.flatten().double()
    total = 0.0
    for piece in torch.split(exact * exact, PIECE):
        total += sum(_sum_of_quarter(quarter) for quarter in torch.split(piece, PIECE // QUARTERS))
    return total


def _sum_of_quarter(squares: torch.Tensor) -> float:
    lanes = torch.zeros(LANES, dtype=torch.float64)
    for row in pad(squares, (0, -squares.numel() % LANES)).view(-1, LANES):
        lanes += row
    while lanes.numel() > 1:
        low, high = lanes.chunk(2)
        lanes = low + high
    return lanes.item()


def accumulate(source: torch.Tensor, accumulator: torch.Tensor, key: int = 0, first: int = 0) -> float:
    """Add and return the sum of squares of the new accumulator.

    The sum is a float32. For a bfloat16 accumulator it is rounded up or down: the elements 2 k and 2 k + 1 by the lower
    and the upper half of the random bits of counter k.

    Args:
        source: float32, bfloat16 or float16. IN.
        accumulator: float32 or bfloat16, same shape. INOUT.
        key: 64 bits, for a bfloat16 accumulator.
        first: index of the first element, if these are not the first elements.
    """
    sums = accumulator.float() + source.float()
    if accumulator.dtype == torch.bfloat16:
        index = torch.arange(first, first + sums.numel()).view_as(sums)
        pairs = random_bits(key, index // 2)
        sums = round_stochastic(sums, torch.where(index % 2 == 0, pairs & 0xFFFF, pairs >> 16))
    accumulator.copy_(sums)
    return sum_of_squares(accumulator)
