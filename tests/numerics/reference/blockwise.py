"""8-bit blockwise numbers in the format of bitsandbytes: the maps, and the definition of coding and decoding.

A block of 256 elements shares a scale, its largest magnitude; an element is a code for its share of that. The *dynamic
maps* have 7 decades of shares, each cut into equal steps, twice as many in each as in the one below.

In plain torch: the definition that ``cython_ext/include/blockwise_body.h`` is tested against, bit for bit.

Reference: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861).
"""

from functools import cache
from typing import NamedTuple

import torch

from lightning_cxl.optim.kernels import BLOCK_SIZE, num_blocks
from tests.numerics.reference.rounding import fused_multiply_add

_DECADES = 7
_SHIFT = 2.0**-31  # added to every share, see blockwise_tables.h
_MIN_SCALE = 1e-38


class _Classes(NamedTuple):
    """Lines that connect code and share, by class: 0 is zero, 1 to 7 are the decades, 8 is one."""

    threshold: torch.Tensor
    """Shifted share above which the next class begins."""
    slope: torch.Tensor
    offset: torch.Tensor
    last: torch.Tensor
    """code = slope * shifted share + offset, at most `last`."""
    step: torch.Tensor
    base: torch.Tensor
    """share = step * (middle of the code's step) + base."""


@cache
def _classes(unsigned: bool) -> _Classes:
    rows = [[0.0] * 6]
    threshold_below, step = 0.0, 0.0
    for decade in range(_DECADES):
        edge = 1e-7
        for _ in range(decade):
            edge *= 10.0
        below, count = step, 1 << (decade + unsigned)
        step = 9.0 * edge / count
        threshold_below = edge + (step - below) / 4.0 if decade else (edge + step / 2.0) / 2.0
        rows[-1][0] = threshold_below + _SHIFT
        first = count - unsigned
        offset = first - (edge + _SHIFT) / step
        rows.append([0.0, 1.0 / step, offset, first + count - 0.5, step, edge - step * count])
    rows[-1][0] = 1.0 - step / 4.0 + _SHIFT
    top = 255.0 if unsigned else 128.0
    rows.append([3e38, 0.0, top, top, 0.0, 1.0])
    columns = [torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True)]
    # the kernel keeps the class in the lower 4 bits of its threshold
    tags = torch.arange(len(rows), dtype=torch.int32)
    columns[0] = (columns[0].view(torch.int32) & ~15 | tags).view(torch.float32)
    return _Classes(*columns)


def quantize(values: torch.Tensor, *, unsigned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Code float32 `values`, in order of memory.

    Args:
        values: contiguous; not negative where `unsigned`.
        unsigned: the map of variances; else that of momenta.

    Returns:
        uint8 codes of the same shape, and float32 scales, one per block.
    """
    classes = _classes(unsigned)
    flat = torch.zeros(num_blocks(values.numel()) * BLOCK_SIZE)
    flat[: values.numel()] = values.reshape(-1)
    blocks = flat.view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(dim=1)  # NaN where there is one
    inverse = torch.where(scales < _MIN_SCALE, 0.0, 1.0 / scales)
    share = fused_multiply_add(blocks.abs(), inverse[:, None].expand_as(blocks), torch.full_like(blocks, _SHIFT))
    index = torch.bucketize(share, classes.threshold[:-1])  # share > threshold
    index = torch.where(share.isnan(), _DECADES + 1, index)
    line = fused_multiply_add(share, classes.slope[index], classes.offset[index])
    number = torch.where(line < classes.last[index], line, classes.last[index]).int()
    codes = number if unsigned else torch.where(blocks.signbit(), -number, number).clamp(min=-127) + 127
    return codes.to(torch.uint8).view(-1)[: values.numel()].view(values.shape), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, *, unsigned: bool) -> torch.Tensor:
    """Return the float32 values that `codes` and `scales` stand for; counterpart of `quantize`."""
    classes = _classes(unsigned)
    number = codes.reshape(-1).int()
    number = number + 1 if unsigned else (number - 127).abs()
    middle = number + 0.5
    index = middle.log2().floor().long() + (0 if unsigned else 1)
    scale = torch.where(scales < _MIN_SCALE, 0.0, scales).repeat_interleave(BLOCK_SIZE)[: codes.numel()]
    share = fused_multiply_add(classes.step[index] * scale, middle, classes.base[index] * scale)
    values = share if unsigned else torch.where(codes.reshape(-1) < 127, -share, share)
    return values.view(codes.shape)
