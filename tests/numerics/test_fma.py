"""Fused multiply-add in plain torch, and the kernel's own for CPUs without the instruction."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.numerics.adam_case import ISAS, Case, examples, scalars_at
from tests.numerics.reference.fma import fused_multiply_add


def is_nearest(result: float, exact: Fraction) -> bool:
    """Whether no float32 is nearer to `exact` than `result`; infinity stands for all beyond the largest."""
    if not np.isfinite(result):
        return abs(exact) > Fraction(float(np.finfo(np.float32).max))
    with np.errstate(all="ignore"):
        neighbours = np.nextafter(np.float32(result), np.array([-np.inf, np.inf], dtype=np.float32))
    error = abs(Fraction(result) - exact)
    return all(error <= abs(Fraction(float(other)) - exact) for other in neighbours if np.isfinite(other))


@examples(200)
@given(st.lists(st.tuples(*[st.floats(width=32)] * 3), min_size=1, max_size=50))
def test_it_rounds_once(rows):
    """Against exact rational arithmetic."""
    a, b, c = torch.tensor(rows, dtype=torch.float32).T
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), fused_multiply_add(a, b, c).tolist(), strict=True):
        if np.isfinite([x, y, z]).all():
            assert is_nearest(result, Fraction(x) * Fraction(y) + Fraction(z))
        else:
            plain = x * y + z
            assert result == plain or (np.isnan(result) and np.isnan(plain))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("addend", "expected_ulps"), [(2.0**-60, 1), (0.0, 0), (-(2.0**-60), 0)])
def test_a_sum_that_looks_like_a_tie_is_rounded_by_what_double_loses(sign, addend, expected_ulps):
    """(1 + 2 ** -12) ** 2 is half-way between two floats; the addend, too small for a double, decides."""
    factor = 1 + 2.0**-12
    expected = sign * (1 + 2.0**-11 + expected_ulps * 2.0**-23)
    a, b, c = (torch.tensor([value]) for value in (factor, sign * factor, sign * addend))
    assert fused_multiply_add(a, b, c).item() == expected
    # with beta1 = 0 the momentum is the gradient plus weight decay times weight
    scalars = scalars_at(1.0, lr=0.0, betas=(0.0, 0.9), eps=1.0, weight_decay=factor, decoupled=False)
    for isa in ISAS:
        case = Case.random(40)
        case["weights"].fill_(sign * factor)
        case["grads"].fill_(sign * addend)
        assert (case.run(scalars, isa)["momentum"] == expected).all()
