"""Numbers to be coded in 8 bits, and where the codes have their boundaries."""

import numpy as np
import pytest
import torch

from lightning_cxl.optim.kernels import BLOCK_SIZE

both_maps = pytest.mark.parametrize("unsigned", [False, True], ids=["signed", "unsigned"])
BOUNDARY = 5e-6
"""A share this close to the middle between two codes, relatively, may get either.

Share, slope, offset and the multiply-add each round to 2^-24 of numbers up to 2 * 9 times the lower edge of the decade:
4.3e-6 of the smallest share in it. The threshold between decades keeps 20 bits: 1.8e-6.
"""


def draw(size: int, seed: int, *, unsigned: bool, spread: float = 4.0) -> torch.Tensor:
    """Normal numbers of many sizes."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(size) * np.exp(spread * rng.standard_normal(size))
    values = torch.from_numpy(numbers.clip(-3e38, 3e38).astype(np.float32))
    return values.abs() if unsigned else values


def shares_of(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return values.double() / scales.double().repeat_interleave(BLOCK_SIZE)[: values.numel()]


def nearest_codes(share: torch.Tensor, qmap: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest code of every share, and its distance to the nearest boundary between codes; in double."""
    middles = (qmap[:-1].double() + qmap[1:].double()) / 2
    index = torch.bucketize(share, middles)
    neighbours = torch.stack([middles[(index - 1).clamp(min=0)], middles[index.clamp(max=254)]])
    return index, (neighbours - share).abs().amin(0)
