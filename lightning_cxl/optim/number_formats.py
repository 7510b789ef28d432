"""Number formats of host tensors: the codes that kernels take for them, split master weights, keys of random bits.

``cython_ext/include/number_formats.h`` does the same in C, bit for bit. Bit patterns are int64 tensors here, because
torch has little arithmetic for unsigned integers.
"""

from typing import Literal

import torch

StatePrecision = Literal["fp32", "bf16", "8bit"]
"""How momentum and variance are kept."""
MasterForm = Literal["split", "fp32"]
"""How master weights are kept beside 16-bit compute weights."""

GRAD_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WEIGHTS_FP32, WEIGHTS_BF16, WEIGHTS_FP16, WEIGHTS_SPLIT = range(4)
STATE_FORMATS: dict[StatePrecision, int] = {"fp32": 0, "bf16": 1, "8bit": 2}

_LOW = 0xFFFF
_WORD = 0xFFFFFFFF


def pack(grad: int, weights: int, state: int) -> int:
    """Return the one number that tells a kernel the formats of a span."""
    return grad | weights << 2 | state << 4


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 `values` as compute weights and remainders: upper half, rounded to nearest, and lower half.

    Ties go away from zero: with ties to even, a remainder of one half would not tell whether it was rounded up.

    Returns:
        bfloat16 and int16 tensors of the same shape.
    """
    bits = _bits(values)
    upper = torch.where(values.isnan(), bits >> 16 | 0x40, bits + 0x8000 >> 16)
    return _to_bits16(upper).view(torch.bfloat16), _to_bits16(bits & _LOW)


def join(compute_weights: torch.Tensor, remainders: torch.Tensor) -> torch.Tensor:
    """Return the float32 master weights that `split` took apart, bit for bit (a NaN becomes a quiet one).

    A compute weight that someone else has changed keeps its remainder, which is less than a rounding error of it;
    beside a zero, only a remainder that can belong to it counts.
    """
    upper, lower = compute_weights.view(torch.int16).long() & _LOW, remainders.long() & _LOW
    magnitude = upper & 0x7FFF
    rounded_up = (lower >= 0x8000) & (magnitude != 0) & (magnitude <= 0x7F80)
    lower = torch.where((magnitude == 0) & (lower >= 0x8000), 0, lower)
    return _from_bits((upper << 16) - (rounded_up.long() << 16) + lower)


def mix_key(*numbers: int) -> int:
    """Return a 64-bit key that depends on every one of the integers (splitmix64 finaliser after each)."""
    key = 0
    for number in numbers:
        key = (key + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        key = (key ^ key >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 31
    return key


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).long() & _WORD


def _from_bits(bits: torch.Tensor) -> torch.Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


def _to_bits16(bits: torch.Tensor) -> torch.Tensor:
    """Return the lower 16 bits as int16."""
    bits = bits & _LOW
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).short()
