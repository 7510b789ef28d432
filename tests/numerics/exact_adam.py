"""Adam in double precision from its textbook formulas, and how far a float32 computation of it may be off.

Independent of `tests.numerics.reference.adam`: hyper-parameters are used as they are, nothing is rounded to float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from lightning_cxl.optim.kernels import StatePrecision

U = 2.0**-24
"""Relative error of one correctly rounded float32 operation."""
TINY = 2.0**-149
"""The smallest float32: an operation with a denormal result is off by at most half of it."""
LARGEST = 3.38e38
"""Numbers up to here are finite in float32, and after rounding to bfloat16."""
SECOND_ORDER = 1 + 1e-5
"""For products of errors, and for the rounding of double precision itself."""


class Options(NamedTuple):
    step: float
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    grad_scale: float


class Result(NamedTuple):
    """Exact values, and the error that float32 arithmetic may make in each; all double."""

    master: torch.Tensor
    momentum: torch.Tensor
    variance: torch.Tensor
    master_error: torch.Tensor
    momentum_error: torch.Tensor
    variance_error: torch.Tensor
    covered: torch.Tensor
    """Where nothing overflows on the way and no denominator may be zero."""


def exact_adam(
    master: torch.Tensor,
    grads: torch.Tensor,
    momentum: torch.Tensor,
    variance: torch.Tensor,
    options: Options,
    state: StatePrecision = "fp32",
) -> Result:
    """Return one step and its error bounds, first order in `U` with every operation of the kernel counted once.

    In the comments, d(x) is the bound of the error of x. A hyper-parameter is rounded to float32: U of itself.
    With 16- and 8-bit `state` the kernel multiplies numerator and denominator of the change by the root of bias2, which
    saves a division, rounds step size and eps twice more, and makes a denormal error in them count for more.
    """
    w, g, m, v = (t.double() for t in (master, grads, momentum, variance))
    decay, l2 = (1 - options.lr * options.weight_decay, 0.0) if options.decoupled else (1.0, options.weight_decay)
    beta1, beta2 = options.betas
    grad = g * options.grad_scale + l2 * w
    # scale and product round: 2 U of the first term; l2 rounds: U of the second; the sum rounds
    size = (g * options.grad_scale).abs() + (l2 * w).abs()
    d_grad = 3 * U * size + TINY
    new_m, spread = beta1 * m + (1 - beta1) * grad, size + m.abs()
    d_m = _momentum_error(beta1, d_grad, spread) + U * new_m.abs() + TINY
    new_v = beta2 * v + (1 - beta2) * grad * grad
    # beta2 and its product, 1 - beta2 and its product: 2 U each; the sum: U
    d_v = 3 * U * new_v + (1 - beta2) * (2 * grad.abs() * d_grad + d_grad * d_grad) + 3 * TINY * (1 + grad.abs())

    bias1, bias2 = (-math.expm1(options.step * math.log(beta)) if beta else 1.0 for beta in options.betas)
    bias2_sqrt, scaled = math.sqrt(bias2), state != "fp32"
    step_size = options.lr / bias1
    denominator, d_denominator = _denominator(new_v, d_v, bias2_sqrt, options.eps, scaled)
    smallest = denominator - d_denominator
    change = step_size * new_m / denominator
    d_tiny = TINY * (1 + new_m.abs()) / bias2_sqrt if scaled else TINY
    # step size, product and quotient: 3 U, scaled 5 U; and what the error of the denominator makes of it
    rounding = (5 if scaled else 3) * U * change.abs()
    d_change = rounding + (step_size * d_m + d_tiny + change.abs() * d_denominator) / smallest + TINY
    new_w = w * decay - change
    # decay and its product: 2 U; the sum: U
    d_w = 2 * U * (w * decay).abs() + d_change + U * new_w.abs() + TINY

    numbers = [size, spread, grad * grad, new_v + d_v, denominator, step_size * new_m, change, w * decay, new_w]
    finite = torch.stack(numbers).abs().amax(0) < LARGEST
    errors = (t * SECOND_ORDER for t in (d_w, d_m, d_v))
    return Result(new_w, new_m, new_v, *errors, finite & (smallest > 0) & d_w.isfinite())


def _momentum_error(beta1: float, d_grad: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Return d(momentum) before its last rounding; `spread` bounds |grad - momentum|, which rounds once."""
    if torch.tensor(1 - beta1).item() < 0.5:  # from the old momentum; 1 - beta1 rounds
        return (1 - beta1) * (d_grad + 2 * U * spread)
    # from the gradient, whose error counts whole; only 1 - beta1 rounds, and 1 less that does not
    return d_grad + beta1 * (d_grad + U * spread) + U * (1 - beta1) * spread


def _denominator(
    new_v: torch.Tensor, d_v: torch.Tensor, bias2_sqrt: float, eps: float, scaled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    root = new_v.sqrt()
    d_root = torch.maximum((new_v + d_v).sqrt() - root, root - (new_v - d_v).clamp(min=0).sqrt()) + U * root
    denominator = root / bias2_sqrt + eps
    if scaled:  # eps, bias2_sqrt and their product round; the root is divided by nothing
        return denominator, (d_root + TINY) / bias2_sqrt + 3 * U * eps + U * denominator
    # bias2_sqrt rounds, and so does the quotient
    return denominator, (d_root + 2 * U * root) / bias2_sqrt + TINY + U * eps + U * denominator


def storage_error(
    exact: torch.Tensor, error: torch.Tensor, state: StatePrecision, scales: torch.Tensor | None, *, unsigned: bool
) -> torch.Tensor:
    """Return the bound for a moment once it is kept as `state`: `error` and that of its format."""
    largest = exact.abs() + error
    if state == "fp32":
        return error
    if state == "bf16":  # either neighbour: less than their distance, at most 2^-7 of the value
        return error + 2.0**-7 * largest + 2.0**-133
    assert scales is not None
    scale = scales.double().repeat_interleave(256)[: exact.numel()]
    # a smaller scale has no useful reciprocal, and all its values are zero
    lost = torch.where(scale < 1e-38, largest, blockwise_error(largest / scale, unsigned=unsigned) * scale)
    return error + lost + 256 * TINY  # denormal products with up to 256 half steps


def blockwise_error(share: torch.Tensor, *, unsigned: bool) -> torch.Tensor:
    """Return how far the code of a share of the block's scale may be from it, as a share, for shares up to 1.

    The decade below 1 is cut into 128 equal steps, or 64 with a sign, the one below it into half as many, and so on for
    7 decades: a code is the middle of its step, so half a step away. Below the last, nothing is further than half the
    way from zero to its first code. And 5e-6 of the share, for the rounding of boundaries (`BOUNDARY`).
    """
    # a share just above a decade may belong to a code below it, which is no further away than one in the decade
    decade = share.clamp(1e-7, 1).log10().floor().clamp(-7, -1)
    half_step = 0.9 * 10 ** (decade + 1) / 2 ** (decade + 7 + unsigned) / 2
    first = 1e-7 + 0.45e-6 / (1 + unsigned)
    return torch.where(share < 1e-7, torch.tensor(first / 2, dtype=torch.float64), half_step) + 5e-6 * share
