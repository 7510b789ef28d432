"""Float32 numbers by their bits."""

import numpy as np
import torch

LOWER_HALVES = [0, 1, 2, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2001, 0x3000, 0x5000, 0x7FFE, 0x7FFF]
LOWER_HALVES += [0x8000, 0x8001, 0x8002, 0x9000, 0xEFFF, 0xF000, 0xF001, 0xFFFE, 0xFFFF]
"""Where rounding to bfloat16 (half of 2^16) and to float16 (half of 2^13) changes, and their neighbours."""


def every_upper_half(seed: int) -> torch.Tensor:
    """Return int64 bit patterns: all 65536 upper halves, each with `LOWER_HALVES` and 10 random ones."""
    random = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**16, (2**16, 10)))
    lower = torch.cat([torch.tensor(LOWER_HALVES).expand(2**16, -1), random], dim=1)
    return (torch.arange(2**16)[:, None] << 16 | lower).flatten()


def float32_of(bits: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers of int64 bit patterns; only their lower 32 bits count."""
    bits = bits & 0xFFFFFFFF
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def bfloat16_neighbours(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest bfloat16 towards zero and away from it, as bfloat16; the same where the value is one."""
    bits = values.view(torch.int32).long()
    towards, away = float32_of(bits & ~0xFFFF), float32_of((bits + 0xFFFF) & ~0xFFFF)
    return towards.to(torch.bfloat16), away.to(torch.bfloat16)


def ulp(values: torch.Tensor) -> torch.Tensor:
    """Return the distance to the next float32 away from zero, as double."""
    return torch.from_numpy(np.spacing(values.float().abs().numpy()).astype(np.float64))
