"""Random bits, stochastic rounding and fused sums in plain torch, as in ``cython_ext/include/number_formats.h``.

Bit patterns are int64 tensors here, because torch has little arithmetic for unsigned integers.
"""

import torch

_LOW = 0xFFFF
_WORD = 0xFFFFFFFF


def random_bits(key: int, counters: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits per counter, the same ones for the same key and counter, as int64.

    Args:
        key: 64 bits.
        counters: int64, any shape; the upper 32 bits of a counter change the key.
    """
    x = (counters ^ key) & _WORD
    x = _multiply(x ^ x >> 16, 0x7FEB352D)
    x = x + (key >> 32) + (counters >> 32) * 0x9E3779B9 & _WORD  # neighbouring keys would give related numbers
    x = _multiply(x ^ x >> 15, 0x846CA68B)
    return x ^ x >> 16


def round_stochastic(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Return float32 `values` as bfloat16, up or down with the probability that makes the expected result exact.

    Args:
        values: float32.
        random: int64, 16 uniform random bits per element.
    """
    bits = values.view(torch.int32).long() & _WORD
    upper = torch.where(values.isnan(), bits >> 16 | 0x40, bits + random >> 16)
    upper = upper & _LOW
    return torch.where(upper >= 1 << 15, upper - (1 << 16), upper).short().view(torch.bfloat16)


def _multiply(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the lower 32 bits of the product of two 32-bit numbers."""
    high, low = factor >> 16, factor & _LOW
    return ((x * high & _LOW) << 16) + x * low & _WORD


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return float32 ``a * b + c`` rounded once.

    The product is exact in double. The sum is rounded to odd there, which makes the final rounding to float32 the
    only one that counts (Boldo & Melquiond 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inexact = (lost < 0) | (lost > 0)  # neither when the sum is not finite
    away = torch.where((lost > 0) == (total > 0), 1, -1)
    odd = torch.where(inexact & (bits % 2 == 0), bits + away, bits)
    return odd.view(torch.float64).float()
