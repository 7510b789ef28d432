"""8-bit numbers in the format of bitsandbytes: coded, decoded, and the map that both sides agree on.

A block of 256 elements shares a scale, its largest magnitude; an element is a code for its share of that. The *dynamic
maps* have 7 decades of shares, each cut into equal steps, twice as many in each as in the one below.

Reference: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861).
"""

from functools import cache
from typing import Any

import torch

from lightning_cxl.errors import CheckpointError
from lightning_cxl.native import _adam, _cpu

BLOCK_SIZE = 256


def num_blocks(numel: int) -> int:
    """Return how many scales `numel` elements have."""
    return -(-numel // BLOCK_SIZE)


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, unsigned: bool) -> None:
    """Code float32 values in blocks of 256 in memory order.

    Args:
        values: without gaps. IN.
        codes: uint8 with the same strides. OUT.
        scales: float32, one per block. OUT.
        unsigned: the map of variances, which are not negative; else that of momenta.
    """
    _adam.quantize(_numpy(flattened(values)), _numpy(flattened(codes)), _numpy(scales), unsigned, _cpu.best_isa())
    torch.autograd.graph.increment_version([codes, scales])  # as after an operation of torch


def decode(codes: torch.Tensor, scales: torch.Tensor, *, unsigned: bool) -> torch.Tensor:
    """Return the float32 values of dense 8-bit `codes`, in the same element order."""
    values = torch.empty_strided(codes.shape, codes.stride(), dtype=torch.float32)
    _adam.dequantize(
        _numpy(flattened(codes)),
        _numpy(scales.float().cpu().contiguous()),
        _numpy(flattened(values)),
        unsigned,
        _cpu.best_isa(),
    )
    return values


@cache
def dynamic_map(unsigned: bool) -> torch.Tensor:
    """Return the share of every code, float32 ``(256,)``: bitsandbytes calls it `qmap` or `code`."""
    return decode(torch.arange(256, dtype=torch.uint8), torch.ones(1), unsigned=unsigned)


def check_map(qmap: object, name: str, *, unsigned: bool) -> None:
    """Refuse 8-bit codes with another map than the dynamic one.

    Raises:
        CheckpointError: names the parameter.
    """
    if qmap is None:
        return
    known = dynamic_map(unsigned)
    if (
        not isinstance(qmap, torch.Tensor)
        or qmap.shape != known.shape
        or qmap.is_meta
        or not torch.allclose(qmap.float().cpu(), known, rtol=1e-5, atol=1e-12)
    ):
        raise CheckpointError(f"the saved 8-bit state of {name} uses another map than bitsandbytes' dynamic one")


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _numpy(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy()
