"""The kernel's number formats: what it reads and writes in 16 bits, split master weights, stochastic rounding."""

import pytest
import torch

from lightning_cxl.optim import kernels as formats
from lightning_cxl.optim.kernels import WEIGHTS_BF16, WEIGHTS_FP16, WEIGHTS_FP32, WEIGHTS_SPLIT
from tests.numerics.adam_case import INTEGERS, ISAS, Case, Formats, equal_bits, scalars_at, update
from tests.numerics.bit_patterns import (
    SIGMAS,
    bfloat16_neighbours,
    check_share_rounded_up,
    correlation,
    every_upper_half,
    float32_of,
)

BF16_STATE = Formats(torch.float32, WEIGHTS_FP32, "bf16")


def kept_weights(values: torch.Tensor, weights: int, isa: str, state: formats.StatePrecision = "fp32") -> Case:
    """Apply a step that changes no weight: learning rate 0, and gradients above 0, as -0.0 - 0.0 is -0.0 again."""
    zeros, ones = torch.zeros_like(values), torch.ones_like(values)
    case = Case.of(values, ones, zeros, zeros, Formats(torch.float32, weights, state))
    return case.run(scalars_at(1.0, lr=0.0, weight_decay=0.0), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("state", formats.STATE_FORMATS)
def test_split_master_weights_survive_a_step_bit_for_bit(isa, state):
    values = float32_of(every_upper_half(seed=3))
    case = kept_weights(values, WEIGHTS_SPLIT, isa, state)
    assert equal_bits(case.master(), values).all()
    assert equal_bits(case["compute"], formats.split(values)[0]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_compute_weights_are_those_of_split_masters(isa):
    values = float32_of(every_upper_half(seed=4))
    case = kept_weights(values, WEIGHTS_BF16, isa)
    assert equal_bits(case["compute"], formats.split(values)[0]).all()
    assert equal_bits(case["weights"], values).all()


@pytest.mark.parametrize("isa", ISAS)
def test_float16_compute_weights_are_rounded_as_torch_does(isa):
    """Nearest, ties to even; denormals, overflow to infinity, NaN stays NaN."""
    values = float32_of(every_upper_half(seed=5))
    case = kept_weights(values, WEIGHTS_FP16, isa)
    assert equal_bits(case["compute"], values.half()).all()
    assert equal_bits(case["weights"], values).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_read_exactly(isa, dtype):
    """With beta1 = 0 the momentum is the gradient, unless that is infinite: infinity * 0 is NaN. So 0.9 for these."""
    grads = torch.arange(2**16).short().view(dtype)
    zeros = torch.zeros(2**16)
    for betas, chosen in (((0.0, 0.999), grads.isfinite()), ((0.9, 0.999), ~grads.isfinite())):
        case = Case.of(zeros, zeros, zeros, zeros, Formats(dtype, WEIGHTS_FP32, "fp32"))
        case["grads"].copy_(grads)
        case.run(scalars_at(betas=betas), isa)
        assert equal_bits(case["momentum"], grads.float())[chosen].all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("grad", formats.GRAD_FORMATS, ids=str)
@pytest.mark.parametrize("state", formats.STATE_FORMATS)
def test_200_steps_with_split_masters_are_those_with_float32_masters(isa, grad, state):
    """Master weights, compute weights, moments: bit-identical after every step."""
    generator = torch.Generator().manual_seed(0)
    size = 300
    master = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-6, 3, (size,), generator=generator)
    zeros = torch.zeros(size)
    split, full = (
        Case.of(master, zeros, zeros, zeros, Formats(grad, weights, state)) for weights in (WEIGHTS_SPLIT, WEIGHTS_BF16)
    )
    for step in range(1, 201):
        # the loss is a function of the compute weights, as in training: an error would feed back
        for case in (split, full):
            noise = torch.randn(size, generator=torch.Generator().manual_seed(step))
            case["grads"].copy_((formats.split(master)[0] if step == 1 else case["compute"]).float() * 0.1 + noise)
            case.key = formats.mix_key(step)
            case.run(scalars_at(float(step), lr=1e-2 / step), isa)
        assert torch.equal(split.master().view(torch.int32), full["weights"].view(torch.int32)), step
        assert torch.equal(split["compute"].view(torch.int16), full["compute"].view(torch.int16)), step
        for name in ("momentum", "variance"):
            assert torch.equal(split[name], full[name]), (step, name)
    assert not torch.equal(full["weights"], master)


# ---- stochastic rounding of bfloat16 state ----


def rounded(values: torch.Tensor, key: int, isa: str = ISAS[-1], num_threads: int = 1) -> tuple[torch.Tensor, ...]:
    """Return momentum and variance: with both betas 0, the values and their squares, rounded by the kernel."""
    zeros = torch.zeros_like(values)
    case = Case.of(zeros, values, zeros, zeros, BF16_STATE, key)
    case.run(scalars_at(betas=(0.0, 0.0), lr=0.0), isa, num_threads)
    return case["momentum"], case["variance"]


@pytest.mark.parametrize("isa", ISAS)
def test_state_is_rounded_to_one_of_the_two_neighbours(isa):
    values = float32_of(every_upper_half(seed=6))
    values = values[values.isfinite()]
    for result, exact in zip(rounded(values, 99, isa), (values, values * values), strict=True):
        towards, away = bfloat16_neighbours(exact)
        assert (equal_bits(result, towards) | equal_bits(result, away)).all()
        inexact = towards != away
        assert 0.4 < (equal_bits(result, away) & inexact).sum() / inexact.sum() < 0.6


@pytest.mark.parametrize("isa", ISAS)
def test_rounding_of_state_is_unbiased_and_that_of_the_two_moments_is_uncorrelated(isa):
    count = 2**17
    for index, bits in enumerate((0x3F800001, 0x3F8000FF, 0x3F804000, 0xBF817FFF, 0x3F888000, 0x40AAABCD, 0x3234FFFF)):
        value = float32_of(torch.tensor([bits]))
        momentum, variance = rounded(value.expand(count).contiguous(), formats.mix_key(index), isa, 2)
        for result, exact in ((momentum, value), (variance, value * value)):
            share = (exact.view(torch.int32).item() & 0xFFFF) / 2**16
            check_share_rounded_up(exact, result, share)
        ups = [(result != result.min()) for result in (momentum.abs(), variance)]
        if all(0 < up.sum() < count for up in ups):
            assert abs(correlation(*ups)) < SIGMAS / count**0.5, hex(bits)


def test_a_decay_smaller_than_the_rounding_error_is_not_lost():
    """0.999 is nearer to 1 than to any other bfloat16: rounded to nearest, a variance of 1 would never decay.

    One rounding of a number below 1 has at most half the spacing 2^-8 as standard deviation, so the mean of n elements
    after k steps is off by at most 5 * 2^-9 * sqrt(k / n).
    """
    count, num_steps = 4096, 700
    zeros = torch.zeros(count)
    case = Case.of(zeros, zeros, zeros, zeros + 1, BF16_STATE)
    for step in range(num_steps):
        case.key = formats.mix_key(step)
        case.run(scalars_at(float(step + 1), betas=(0.9, 0.999)))
    mean = case["variance"].double().mean().item()
    assert abs(mean - 0.999**num_steps) < 5 * 2.0**-9 * (num_steps / count) ** 0.5 + 1e-4


def test_rounding_depends_on_key_and_element_only():
    """Not on ISA, threads, cuts, or where a span lies among others, which decides how it is cut into chunks."""
    size = 3 * 65536 + 77
    start = Case.random(size, BF16_STATE, seed=1)
    expected = start.defined(scalars_at())
    for isa in ISAS:
        for num_threads in (1, 2, 5):
            for lead in (0, 1, 256, 300, 65535, 70000):
                ours, before, after = start.clone(), Case.random(lead, BF16_STATE), Case.random(50, BF16_STATE)
                update([before.span(), ours.span(), after.span()], [scalars_at()], isa, num_threads)
                for name in ("momentum", "variance"):
                    assert torch.equal(ours[name], expected[name]), (isa, num_threads, lead)
            parts = start.clone()
            cuts = [(0, 65536), (65536, 3 * 65536), (3 * 65536, size)]
            table = [parts.part(*cut).span(team=team, first=cut[0]) for team, cut in enumerate(cuts)]
            update(table, [scalars_at()], isa, num_threads)
            parts.assert_same(expected, (isa, num_threads))
    # both halves of the key count, and so does the element
    for key in (start.key ^ 1, start.key ^ 1 << 32, start.key ^ 1 << 63):
        other = start.clone()
        other.key = key
        other.run(scalars_at())
        assert 0.2 < (other["momentum"] != expected["momentum"]).double().mean() < 0.8
    same = torch.full((1000,), 1.0 + 2.0**-8)
    integers = rounded(same, 5)[0].view(INTEGERS[torch.bfloat16])
    assert integers.unique().numel() == 2


def test_random_numbers_go_on_beyond_32_bits_of_elements():
    """Behind another span, so that a chunk of this one lies across element 2^32."""
    start = Case.random(3 * 65536, BF16_STATE, seed=2)
    for first in (2**32 - 65536, 2**32, 2**33 - 2 * 65536, 5 * 2**32):
        expected = start.defined(scalars_at(), first)
        for isa in ISAS:
            for lead in (0, 300):
                ours, before = start.clone(), Case.random(lead)
                update([before.span(), ours.span(first=first)], [scalars_at()], isa, 2)
                ours.assert_same(expected, (first, isa, lead))
