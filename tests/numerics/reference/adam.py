"""The Adam update in plain torch: the definition that the compiled kernel is tested against, bit for bit.

The order of operations is that of ``torch.optim.adam._single_tensor_adam``. Torch's own CPU kernels (AVX2, AVX-512)
fuse the multiply and the add of ``lerp_``, ``addcmul_`` and ``add(alpha=)``; so does this definition, by arithmetic
that gives the same bits on every CPU: momentum and variance equal torch's bit for bit. One operation differs: torch
takes ``sqrt`` from MKL, which is off by one ulp for about a fifth of all arguments; here it is correctly rounded.

Reference: Kingma & Ba 2015 (arXiv:1412.6980); Loshchilov & Hutter 2019 (arXiv:1711.05101), Algorithm 2.
"""

import torch

from lightning_cxl.optim.kernels import join, split
from lightning_cxl.optim.parameter_state import AdamScalars
from tests.numerics.reference.blockwise import dequantize, quantize
from tests.numerics.reference.rounding import fused_multiply_add, random_bits, round_stochastic


def adam_update(t, scalars, key=0, first=0):
    """Apply one Adam update in place. The dtypes of the tensors, all contiguous, say how each is kept.

    Args:
        t: by their names in ``struct adam_span``, None where there is none. Either `weights`, float32, and perhaps
            `compute`, bfloat16 or float16, which gets the new weights, bfloat16 rounded as in `split`; or `compute`,
            bfloat16, and `rest`, what it lacks of float32 master weights. `grads`: float32, bfloat16 or float16.
            `momentum` and `variance`: float32, bfloat16, or uint8 with `momentum_scale` and `variance_scale`.
        scalars: of this step; each is rounded to float32 first.
        key: of the stochastic rounding of bfloat16 state.
        first: number of the first element; element i in memory uses random number ``first + i``.
    """
    s = AdamScalars(*torch.tensor(scalars, dtype=torch.float32).unbind())  # type: ignore[arg-type]
    master = t["weights"] if t["rest"] is None else join(t["compute"], t["rest"])
    old_m = read(t["momentum"], t["momentum_scale"], unsigned=False)
    old_v = read(t["variance"], t["variance_scale"], unsigned=True)
    scaled = t["grads"].float() * s.grad_scale
    grad = scaled if s.l2 == 0 else fused_multiply_add(torch.as_tensor(s.l2), master, scaled)
    if s.lerp_weight < 0.5:
        new_m = fused_multiply_add(torch.as_tensor(s.lerp_weight), grad - old_m, old_m)
    else:
        new_m = fused_multiply_add(s.lerp_weight - torch.ones(()), grad - old_m, grad)
    new_v = fused_multiply_add(s.square_weight * grad, grad, old_v * s.beta2)
    root = new_v.double().sqrt().float()
    if t["momentum"].dtype == torch.float32:
        updated = master * s.decay + s.neg_step_size * new_m / (root / s.bias2_sqrt + s.eps)
    else:  # not torch's anyway: one division and two roundings less
        change = s.neg_step_size * s.bias2_sqrt * new_m / (root + s.eps * s.bias2_sqrt)
        updated = fused_multiply_add(master, torch.as_tensor(s.decay), change)
    upper, lower = split(updated)
    if t["weights"] is not None:
        t["weights"].copy_(updated)
    if t["compute"] is not None:
        t["compute"].copy_(upper if t["compute"].dtype == torch.bfloat16 else updated)
    if t["rest"] is not None:
        t["rest"].copy_(lower)
    count = new_m.numel() if t["momentum"].dtype == torch.bfloat16 else 0
    random = random_bits(key, first + torch.arange(count))
    _store(new_m, t["momentum"], t["momentum_scale"], random & 0xFFFF, unsigned=False)
    _store(new_v, t["variance"], t["variance_scale"], random >> 16, unsigned=True)


def read(state, scale, *, unsigned):
    """Return momentum or variance as float32."""
    return state.float() if scale is None else dequantize(state, scale, unsigned=unsigned)


def _store(values, home, scale, random, *, unsigned):
    if scale is not None:
        codes, largest = quantize(values, unsigned=unsigned)
        home.copy_(codes)
        scale.copy_(largest)
    else:
        home.copy_(round_stochastic(values, random) if home.dtype == torch.bfloat16 else values)
