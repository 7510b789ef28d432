"""Arithmetic of the definitions in plain torch: split master weights, random bits, stochastic rounding, fused sums."""

import numpy as np
import pytest
import torch

from lightning_cxl.optim import kernels as formats
from tests.numerics.adam_case import ISAS, Case, equal_bits, scalars_at
from tests.numerics.bit_patterns import bfloat16_neighbours, every_upper_half, float32_of
from tests.numerics.reference.rounding import fused_multiply_add, random_bits, round_stochastic


def test_split_and_join_are_exact_for_every_upper_half():
    """All 65536 of them, so every carry, sign, denormal, infinity and NaN, with interesting and random lower halves."""
    values = float32_of(every_upper_half(seed=0))
    joined = formats.join(*formats.split(values))
    nan = values.isnan()
    assert torch.equal(joined.view(torch.int32)[~nan], values.view(torch.int32)[~nan])
    # a NaN keeps its sign and payload and becomes a quiet one
    assert torch.equal(joined.view(torch.int32)[nan], values.view(torch.int32)[nan] | 0x400000)


def test_the_compute_weight_is_the_nearest_bfloat16_and_ties_go_away_from_zero():
    bits = every_upper_half(seed=1)
    values = float32_of(bits)
    compute, _ = formats.split(values)
    assert torch.equal(compute.isnan(), values.isnan())
    tie = (bits & 0xFFFF) == 0x8000
    assert equal_bits(compute, values.to(torch.bfloat16))[~tie].all()
    away = float32_of((bits & ~0xFFFF) + 0x10000)
    assert equal_bits(compute.float(), away)[tie & ~values.isnan()].all()


def test_a_changed_compute_weight_stays_what_it_was_set_to():
    """Whatever remainder lies beside it; an infinity may become a NaN, as the remainder of a finite weight is lost."""
    compute = torch.arange(2**16).to(torch.int32).short().view(torch.bfloat16)
    for remainder in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xC321):
        joined = formats.join(compute, torch.full((2**16,), remainder).short())
        kept = ~compute.isinf()
        assert equal_bits(formats.split(joined)[0], compute)[kept].all()
        assert not joined[~kept].isfinite().any() or remainder >= 0x8000
    zeros = torch.tensor([0.0, -0.0], dtype=torch.bfloat16)
    assert equal_bits(formats.join(zeros, torch.tensor([0x8000, 0xFFFF]).short()), zeros.float()).all()


def keys() -> list[int]:
    return [formats.mix_key(seed, parameter, step) for seed in (0, 1) for parameter in (0, 1) for step in (1, 2)]


COUNT = 2**18
COUNTERS = torch.arange(COUNT)
SIGMAS = 5.0
"""Statistics may be this many standard deviations off: chance alone would do it once in 1.7 million times, and the
numbers are the same in every run."""


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1].item()


@pytest.mark.parametrize("key", keys())
def test_every_random_bit_is_fair_and_no_pair_of_halves_is_correlated(key):
    bits = random_bits(key, COUNTERS)
    assert ((bits >= 0) & (bits < 2**32)).all()
    for position in range(32):
        assert abs((bits >> position & 1).double().mean() - 0.5) < SIGMAS * 0.5 / COUNT**0.5, position
    low, high = bits & 0xFFFF, bits >> 16
    limit = SIGMAS / COUNT**0.5
    neighbours = [(one[1:], other[:-1]) for one in (low, high) for other in (low, high)]
    for one, other in [(low, high), *neighbours]:
        assert abs(correlation(one, other)) < limit
    # and no bit of one half says anything about a bit of the other
    ones = torch.stack([bits >> position & 1 for position in range(32)]).double()
    between = torch.corrcoef(ones) - torch.eye(32)
    assert between.abs().max() < 6 * limit / SIGMAS  # the largest of 496


def test_random_bits_depend_on_key_and_counter_and_nothing_else():
    key = formats.mix_key(1, 2, 3)
    bits = random_bits(key, COUNTERS)
    assert torch.equal(bits[500:], random_bits(key, COUNTERS[500:]))
    assert torch.equal(bits.view(-1, 2), random_bits(key, COUNTERS.view(-1, 2)))
    assert bits.unique().numel() == COUNT  # a bijection of 32 bits
    for other in [key ^ 1 << position for position in range(64)] + keys():
        changed = bits[:4096] ^ random_bits(other, COUNTERS[:4096])
        share = sum((changed >> position & 1).double().mean() for position in range(32)) / 32
        assert 0.4 < share < 0.6, hex(other)
    # beyond 2 ** 32 elements the counter starts again with another key, far from this one
    far = random_bits(key, COUNTERS + 2**32)
    assert abs(correlation(far, bits)) < SIGMAS / COUNT**0.5
    assert torch.equal(far, random_bits((key + (0x9E3779B9 << 32)) % 2**64, COUNTERS))


def test_mixed_keys_differ_in_every_argument():
    seen = {formats.mix_key(*numbers) for numbers in np.ndindex(20, 20, 20)}
    assert len(seen) == 20**3
    assert len({formats.mix_key(*numbers) for numbers in [(), (0,), (0, 0), (1, 0), (0, 1), (2**64 - 1, 1)]}) == 6
    assert all(0 <= key < 2**64 for key in seen)
    for position in range(64):  # each bit of the key takes both values about equally often
        share = sum(key >> position & 1 for key in seen) / len(seen)
        assert abs(share - 0.5) < SIGMAS * 0.5 / len(seen) ** 0.5, position


def test_stochastic_rounding_takes_one_of_the_two_neighbours_and_keeps_what_is_exact():
    bits = every_upper_half(seed=2)
    values = float32_of(bits)
    rounded = round_stochastic(values, random_bits(7, torch.arange(len(bits))) & 0xFFFF)
    towards, away = bfloat16_neighbours(values)
    assert (equal_bits(rounded, towards) | equal_bits(rounded, away) | values.isnan()).all()
    assert torch.equal(rounded.isnan(), values.isnan())
    assert equal_bits(rounded.float(), values)[(bits & 0xFFFF) == 0].all()
    for random in (0, 0xFFFF):  # the extremes of the random bits reach both
        extreme = round_stochastic(values, torch.full_like(bits, random))
        assert equal_bits(extreme, away if random else towards)[~values.isnan()].all()


def test_stochastic_rounding_is_unbiased():
    """Of COUNT draws, a share f of the way up is rounded up f * COUNT times, within 5 binomial standard deviations.

    So the mean of all rounding errors is less than 5 / sqrt(4 * COUNT), 0.5 % of the spacing, for every f.
    """
    for index, lower in enumerate((1, 37, 0x4000, 0x7FFF, 0x8000, 0xABCD, 0xFFFF)):
        upper = (0x3F80, 0x0000, 0x0080, 0xBF80, 0x7F00, 0x4123, 0x8001)[index]
        value, share = float32_of(torch.tensor([upper << 16 | lower])), lower / 2**16
        random = random_bits(formats.mix_key(index), COUNTERS)
        for half in (random & 0xFFFF, random >> 16):
            ups = (round_stochastic(value.expand(COUNT), half) == bfloat16_neighbours(value)[1]).sum().item()
            assert abs(ups - share * COUNT) <= SIGMAS * (share * (1 - share) * COUNT) ** 0.5, (value, share, ups)


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
