"""The Adam update in plain torch: the definition that the compiled kernel is tested against, bit for bit.

The order of operations is that of ``torch.optim.adam._single_tensor_adam``. Torch's own CPU kernels (AVX2, AVX-512)
fuse the multiply and the add of ``lerp_``, ``addcmul_`` and ``add(alpha=)``; so does this definition, by arithmetic
that gives the same bits on every CPU: momentum and variance equal torch's bit for bit. One operation differs: torch
takes ``sqrt`` from MKL, which is off by one ulp for about a fifth of all arguments; here it is correctly rounded.

Reference: Kingma & Ba 2015 (arXiv:1412.6980); Loshchilov & Hutter 2019 (arXiv:1711.05101), Algorithm 2.
"""

from typing import NamedTuple

import torch


class AdamScalars(NamedTuple):
    """What one update needs besides the tensors; the row of numbers the kernel takes, in this order."""

    decay: float
    """Factor of the weight before the update: 1 - lr * weight_decay when decoupled, else 1."""
    l2: float
    """Weight decay added to the gradient when not decoupled, else 0."""
    lerp_weight: float
    """1 - beta1."""
    beta2: float
    square_weight: float
    """1 - beta2."""
    bias2_sqrt: float
    """sqrt(1 - beta2 ** step)."""
    eps: float
    neg_step_size: float
    """-lr / (1 - beta1 ** step)."""

    @classmethod
    def at_step(
        cls,
        step: float,
        *,
        lr: float | torch.Tensor,
        betas: tuple[float | torch.Tensor, float | torch.Tensor],
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> "AdamScalars":
        """Return the scalars of the 1-based `step`, in double precision as torch computes them.

        A tensor `lr` or `betas` is used as it is, so that its own precision decides, as in torch.
        """
        beta1, beta2 = betas
        return cls(
            decay=float(1 - lr * weight_decay) if decoupled and weight_decay != 0 else 1.0,
            l2=0.0 if decoupled else float(weight_decay),
            lerp_weight=float(1 - beta1),
            beta2=float(beta2),
            square_weight=float(1 - beta2),
            bias2_sqrt=float((1 - beta2**step) ** 0.5),
            eps=float(eps),
            neg_step_size=float(-(lr / (1 - beta1**step))),
        )


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


def adam_update(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    momentum: torch.Tensor,
    variance: torch.Tensor,
    scalars: AdamScalars,
    compute_weights: torch.Tensor | None = None,
) -> None:
    """Apply one Adam update in place.

    Args:
        weights: float32, any shape. INOUT.
        gradients: float32, same shape. IN.
        momentum: float32, same shape. INOUT.
        variance: float32, same shape. INOUT.
        scalars: of this step; each is rounded to float32 first.
        compute_weights: bfloat16, same shape; gets the new weights, rounded to nearest even. OUT.
    """
    s = AdamScalars(*torch.tensor(scalars, dtype=torch.float32).unbind())  # type: ignore[arg-type]
    grad = gradients if s.l2 == 0 else fused_multiply_add(torch.as_tensor(s.l2), weights, gradients)
    if s.lerp_weight < 0.5:
        momentum.copy_(fused_multiply_add(torch.as_tensor(s.lerp_weight), grad - momentum, momentum))
    else:
        momentum.copy_(fused_multiply_add(s.lerp_weight - torch.ones(()), grad - momentum, grad))
    variance.copy_(fused_multiply_add(s.square_weight * grad, grad, variance * s.beta2))
    root = variance.double().sqrt().float()
    denominator = root / s.bias2_sqrt + s.eps
    weights.copy_(weights * s.decay + s.neg_step_size * momentum / denominator)
    if compute_weights is not None:
        compute_weights.copy_(weights)
