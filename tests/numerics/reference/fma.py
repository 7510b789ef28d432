"""Fused multiply-add in plain torch: the rounding that kernels get from one instruction."""

import torch


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
