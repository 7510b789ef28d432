"""8-bit blockwise numbers: the map, its error, special blocks, the kernel's coding and decoding, and bitsandbytes."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.native import _adam
from lightning_cxl.optim.kernels import BLOCK_SIZE, dynamic_map, num_blocks
from tests.numerics.adam_case import ISAS, equal_bits, examples, seeds
from tests.numerics.reference.blockwise import dequantize, quantize

both_maps = pytest.mark.parametrize("unsigned", [False, True], ids=["signed", "unsigned"])
every_isa = pytest.mark.parametrize("isa", ISAS)
BOUNDARY = 5e-6
"""A share this close to the middle between two codes, relatively, may get either.

Share, slope, offset and the multiply-add each round to 2^-24 of numbers up to 2 * 9 times the lower edge of the decade:
4.3e-6 of the smallest share in it. The threshold between decades keeps 20 bits: 1.8e-6.
"""
SPECIAL = [0.0, -0.0, 1e-45, 1e-39, -3e-39, 1e-38, 2e-38, 1.0, -1.0, 3e38, -3e38]


def kernel_quantize(values: torch.Tensor, unsigned: bool, isa: str) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.full(values.shape, 99, dtype=torch.uint8)
    scales = torch.full((num_blocks(values.numel()),), -7.0)
    _adam.quantize(values.numpy(), codes.numpy(), scales.numpy(), unsigned, isa)
    return codes, scales


def kernel_dequantize(codes: torch.Tensor, scales: torch.Tensor, unsigned: bool, isa: str) -> torch.Tensor:
    values = torch.full(codes.shape, -7.0)
    _adam.dequantize(codes.numpy(), scales.numpy(), values.numpy(), unsigned, isa)
    return values


def draw(size: int, seed: int, *, unsigned: bool, spread: float = 4.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(size) * np.exp(spread * rng.standard_normal(size))
    values = torch.from_numpy(numbers.clip(-3e38, 3e38).astype(np.float32))
    return values.abs() if unsigned else values


@both_maps
def test_the_map_is_that_of_the_paper(unsigned):
    """Decades of 1, 2, 4 ... 64 steps, twice as many without sign, a code in the middle of each; and 0 and 1."""
    positive = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade + unsigned)
        edges = np.linspace(10.0 ** (decade - 7), 10.0 ** (decade - 6), count + 1)
        positive += ((edges[:-1] + edges[1:]) / 2).tolist()
    expected = torch.tensor(sorted(positive + [-share for share in positive if 0 < share < 1 and not unsigned]))
    assert expected.numel() == 256
    torch.testing.assert_close(dynamic_map(unsigned), expected, rtol=1e-6, atol=0)
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(dynamic_map(unsigned), dequantize(codes, torch.ones(1), unsigned=unsigned))


@both_maps
@every_isa
def test_every_code_survives_decoding_and_coding(unsigned, isa):
    """At any scale; a block that has the code of 1 keeps its scale."""
    codes = torch.arange(256, dtype=torch.uint8)
    for scale in (1.0, 0.3, 1e-37, 1e-20, 3e38, 7e12):
        values = kernel_dequantize(codes, torch.tensor([scale]), unsigned, isa)
        torch.testing.assert_close(values, dynamic_map(unsigned) * scale, rtol=3e-6, atol=1e-43)
        again, scales = kernel_quantize(values, unsigned, isa)
        assert torch.equal(again, codes) and scales.item() == torch.tensor(scale).item()


@both_maps
@every_isa
def test_shares_on_either_side_of_every_boundary_get_the_nearest_code(unsigned, isa):
    qmap = dynamic_map(unsigned).double()
    middles = (qmap[:-1] + qmap[1:]) / 2
    for side, expected in ((1 - BOUNDARY, 0), (1 + BOUNDARY, 1)):
        lower = torch.where(middles > 0, side, 2 - side) * middles  # towards smaller shares first, whatever the sign
        values = torch.cat([lower.float(), torch.ones(1)])  # the scale is 1
        codes, _ = kernel_quantize(values, unsigned, isa)
        assert torch.equal(codes[:255].int(), torch.arange(255, dtype=torch.int32) + expected)
        for scale in (0.7, 1e-30, 1e30):
            codes, _ = kernel_quantize((values.double() * scale).float(), unsigned, isa)
            assert torch.equal(codes[:255].int(), torch.arange(255, dtype=torch.int32) + expected), scale


@both_maps
@every_isa
def test_special_blocks(unsigned, isa):
    nan, inf = float("nan"), float("inf")
    zero = 0 if unsigned else 127
    for values, expected_codes, expected_scale in (
        ([0.0] * 256, [zero] * 256, 0.0), ([0.0], [zero], 0.0), ([3.5], [255], 3.5),
        ([1e-45], [zero], 1e-45), ([9e-39, 1e-39], [zero, zero], 9e-39),  # below 1e-38 no reciprocal is of use
        ([2e-38, 0.0], [255, zero], 2e-38), ([3.4e38, 0.0], [255, zero], 3.4e38),
        ([inf, 1.0, 0.0], [255, zero, zero], inf), ([1.0, nan], None, nan), ([1.0, nan, inf], None, nan),
    ):  # fmt: skip
        tensor = torch.tensor(values)
        codes, scales = kernel_quantize(tensor, unsigned, isa)
        assert equal_bits(scales, torch.tensor([expected_scale])).all(), values
        assert expected_codes is None or codes.tolist() == expected_codes, values
        decoded = kernel_dequantize(codes, scales, unsigned, isa)
        if np.isfinite(expected_scale):
            assert (decoded - tensor).abs().max() <= 1e-38, values
        else:  # an infinity or a NaN spoils its block, visibly
            assert decoded.isnan().all(), values
    # products of a smaller scale with the map would be denormals, rounded so coarsely that a sign could change
    for scale in (0.0, 1e-45, 3e-45, 1e-40, 9.9e-39):
        decoded = kernel_dequantize(torch.arange(256, dtype=torch.uint8), torch.tensor([scale]), unsigned, isa)
        assert (decoded == 0).all(), scale


@both_maps
@examples(150)
@given(
    size=st.sampled_from([0, 1, 15, 16, 17, 255, 256, 257, 512]) | st.integers(0, 1100),
    seed=seeds,
    spread=st.sampled_from([0.0, 1.0, 4.0, 12.0, 40.0]),
    special=st.sampled_from([0.0, 0.01, 0.5]),
    broken=st.sampled_from([0.0, 0.0, 0.002]),
)
def test_the_kernel_codes_and_decodes_as_defined(unsigned, size, seed, spread, special, broken):
    values = draw(size, seed, unsigned=unsigned, spread=spread)
    rng = np.random.default_rng(seed)
    for share, numbers in ((special, SPECIAL), (broken, [float("nan"), float("inf"), float("-inf")])):
        mask = torch.from_numpy(rng.random(size) < share)
        chosen = torch.from_numpy(rng.choice(np.array(numbers, dtype=np.float32), int(mask.sum())))
        values[mask] = chosen.abs() if unsigned else chosen
    codes, scales = quantize(values, unsigned=unsigned)
    decoded = dequantize(codes, scales, unsigned=unsigned)
    random_codes = torch.from_numpy(rng.integers(0, 256, size).astype(np.uint8))
    random_decoded = dequantize(random_codes, scales, unsigned=unsigned)
    scale = scales.repeat_interleave(BLOCK_SIZE)[:size]
    nan, usual = scale.isnan(), scale.isfinite() & (scale >= 1e-38)
    half_a_step = 0.9 / (256 if unsigned else 128)  # of the upper decade, as a share of the block's largest magnitude
    assert ((decoded - values).abs() <= (half_a_step + BOUNDARY) * scale)[usual].all()
    for isa in ISAS:
        own_codes, own_scales = kernel_quantize(values, unsigned, isa)
        assert equal_bits(own_scales, scales).all()
        assert ((own_codes == codes) | nan).all()  # the sign of a NaN is nobody's
        assert equal_bits(kernel_dequantize(codes, scales, unsigned, isa), decoded).all()
        assert equal_bits(kernel_dequantize(random_codes, scales, unsigned, isa), random_decoded).all()


def test_the_kernel_refuses_lengths_that_do_not_fit_together():
    arrays = np.zeros(300, np.float32), np.full(300, 9, np.uint8), np.full(2, 9, np.float32)
    for change, message in (
        ({0: np.zeros(299, np.float32)}, "299 values need 299 codes and 2 scales, got 300 and 2"),
        ({1: arrays[1][:299]}, "300 values need 300 codes and 2 scales, got 299 and 2"),
        ({2: arrays[2][:1]}, "300 values need 300 codes and 2 scales, got 300 and 1"),
        ({0: arrays[0][:256], 1: arrays[1][:256]}, "256 values need 256 codes and 1 scales, got 256 and 2"),
    ):
        values, codes, scales = (change.get(index, array) for index, array in enumerate(arrays))
        with pytest.raises(ValueError, match=re.escape(message)):
            _adam.quantize(values, codes, scales, False, "baseline")
        with pytest.raises(ValueError, match=re.escape(message)):
            _adam.dequantize(codes, scales, values, False, "baseline")
    assert (arrays[1] == 9).all() and (arrays[2] == 9).all() and (arrays[0] == 0).all()
