"""The Adam update in plain torch: the definition that the compiled kernel is tested against, bit for bit.

The order of operations is that of ``torch.optim.adam._single_tensor_adam``. Torch's own CPU kernels (AVX2, AVX-512)
fuse the multiply and the add of ``lerp_``, ``addcmul_`` and ``add(alpha=)``; so does this definition, by arithmetic
that gives the same bits on every CPU: momentum and variance equal torch's bit for bit. One operation differs: torch
takes ``sqrt`` from MKL, which is off by one ulp for about a fifth of all arguments; here it is correctly rounded.

Reference: Kingma & Ba 2015 (arXiv:1412.6980); Loshchilov & Hutter 2019 (arXiv:1711.05101), Algorithm 2.
"""

from typing import NamedTuple

import torch

from lightning_cxl.optim.kernels import join, split
from lightning_cxl.optim.parameter_state import AdamScalars
from tests.numerics.reference.blockwise import dequantize, quantize
from tests.numerics.reference.fma import fused_multiply_add
from tests.numerics.reference.rounding import random_bits, round_stochastic


class StateScales(NamedTuple):
    """Scales of 8-bit state, float32, one per block."""

    momentum: torch.Tensor
    variance: torch.Tensor


def adam_update(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    momentum: torch.Tensor,
    variance: torch.Tensor,
    scalars: AdamScalars,
    compute_weights: torch.Tensor | None = None,
    *,
    remainders: torch.Tensor | None = None,
    scales: StateScales | None = None,
    key: int = 0,
    first: int = 0,
) -> None:
    """Apply one Adam update in place. The dtypes of the tensors, all contiguous, say how each is kept.

    Args:
        weights: float32, or bfloat16 with `remainders`. INOUT.
        gradients: float32, bfloat16 or float16, same shape. IN.
        momentum: float32, bfloat16, or uint8 with `scales`; same shape. INOUT.
        variance: likewise. INOUT.
        scalars: of this step; each is rounded to float32 first.
        compute_weights: bfloat16 or float16, same shape; gets the new weights, bfloat16 rounded as in `split`. OUT.
        remainders: int16, what `weights` lacks of float32 master weights. INOUT.
        scales: of 8-bit state. INOUT.
        key: of the stochastic rounding of bfloat16 state.
        first: number of the first element; element i in memory uses random number ``first + i``.
    """
    s = AdamScalars(*torch.tensor(scalars, dtype=torch.float32).unbind())  # type: ignore[arg-type]
    master = weights if remainders is None else join(weights, remainders)
    old_m, old_v = _load_state(momentum, variance, scales)
    scaled = gradients.float() * s.grad_scale
    grad = scaled if s.l2 == 0 else fused_multiply_add(torch.as_tensor(s.l2), master, scaled)
    if s.lerp_weight < 0.5:
        new_m = fused_multiply_add(torch.as_tensor(s.lerp_weight), grad - old_m, old_m)
    else:
        new_m = fused_multiply_add(s.lerp_weight - torch.ones(()), grad - old_m, grad)
    new_v = fused_multiply_add(s.square_weight * grad, grad, old_v * s.beta2)
    root = new_v.double().sqrt().float()
    if momentum.dtype == torch.float32:
        updated = master * s.decay + s.neg_step_size * new_m / (root / s.bias2_sqrt + s.eps)
    else:  # not torch's anyway: one division and two roundings less
        change = s.neg_step_size * s.bias2_sqrt * new_m / (root + s.eps * s.bias2_sqrt)
        updated = fused_multiply_add(master, torch.as_tensor(s.decay), change)
    if remainders is None:
        weights.copy_(updated)
    else:
        upper, lower = split(updated)
        weights.copy_(upper)
        remainders.copy_(lower)
    if compute_weights is not None:
        compute_weights.copy_(split(updated)[0] if compute_weights.dtype == torch.bfloat16 else updated)
    _store_state(momentum, variance, scales, new_m, new_v, key, first)


def _load_state(
    momentum: torch.Tensor, variance: torch.Tensor, scales: StateScales | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if scales is None:
        return momentum.float(), variance.float()
    return (
        dequantize(momentum, scales.momentum, unsigned=False),
        dequantize(variance, scales.variance, unsigned=True),
    )


def _store_state(
    momentum: torch.Tensor,
    variance: torch.Tensor,
    scales: StateScales | None,
    new_m: torch.Tensor,
    new_v: torch.Tensor,
    key: int,
    first: int,
) -> None:
    if scales is not None:
        for home, home_scales, values, unsigned in (
            (momentum, scales.momentum, new_m, False),
            (variance, scales.variance, new_v, True),
        ):
            codes, largest = quantize(values, unsigned=unsigned)
            home.copy_(codes)
            home_scales.copy_(largest)
    elif momentum.dtype == torch.bfloat16:
        random = random_bits(key, first + torch.arange(new_m.numel()).view(new_m.shape))
        momentum.copy_(round_stochastic(new_m, random & 0xFFFF))
        variance.copy_(round_stochastic(new_v, random >> 16))
    else:
        momentum.copy_(new_m)
        variance.copy_(new_v)
