"""bitsandbytes reads our 8-bit state, we read theirs, and both code numbers alike."""

import pytest
import torch

from lightning_cxl.optim.kernels import BLOCK_SIZE, WEIGHTS_SPLIT, dynamic_map
from tests.numerics.adam_case import ISAS, Case, Formats, scalars_at
from tests.numerics.blockwise_values import BOUNDARY, both_maps, draw, nearest_codes, shares_of
from tests.numerics.reference.blockwise import dequantize, quantize

functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")

TABLE_STEP = 2 / 65536
"""On the CPU they look float32 shares up in a table of 65536 cells from -1 to 1: a share counts as its middle."""


def their_map(unsigned: bool) -> torch.Tensor:
    return functional.create_dynamic_map(signed=not unsigned)


def they_read(codes: torch.Tensor, scales: torch.Tensor, qmap: torch.Tensor) -> torch.Tensor:
    return functional.dequantize_blockwise(codes, absmax=scales, code=qmap, blocksize=BLOCK_SIZE)


@both_maps
def test_the_maps_are_the_same(unsigned):
    torch.testing.assert_close(dynamic_map(unsigned), their_map(unsigned), rtol=1e-6, atol=0)


@both_maps
@pytest.mark.parametrize("size", [1, 255, 256, 257, 10_000])
def test_they_read_ours_and_we_read_theirs(unsigned, size):
    """Equal to 3e-6: maps to 1e-6, and our multiply-add to 26 * 2^-24 of a value at the lower edge of its decade."""
    values = draw(size, size, unsigned=unsigned)
    for codes, scales in (quantize(values, unsigned=unsigned), they_write(values, unsigned)):
        ours = dequantize(codes, scales, unsigned=unsigned)
        for qmap in (their_map(unsigned), dynamic_map(unsigned).clone()):
            torch.testing.assert_close(ours, they_read(codes, scales, qmap), rtol=3e-6, atol=0)


def they_write(values: torch.Tensor, unsigned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    codes, state = functional.quantize_blockwise(values, code=their_map(unsigned), blocksize=BLOCK_SIZE)
    return codes, state.absmax


@both_maps
def test_codes_are_theirs_but_for_shares_at_a_boundary(unsigned):
    """Their exact path, which they take for other dtypes than float32, and their table."""
    values = draw(20_000, 5, unsigned=unsigned)
    codes, scales = quantize(values, unsigned=unsigned)
    share = shares_of(values, scales)
    nearest, distance = nearest_codes(share, their_map(unsigned))
    operator = torch.ops.bitsandbytes.quantize_blockwise
    exact_codes, exact_scales = operator(values.double(), their_map(unsigned), BLOCK_SIZE)
    assert torch.equal(scales, exact_scales.float())
    assert ((codes == exact_codes) | (distance < BOUNDARY * share.abs())).all()
    assert ((codes == nearest) | (distance < BOUNDARY * share.abs())).all()
    assert (codes == exact_codes).double().mean() > 0.999
    table_codes, table_scales = they_write(values, unsigned)
    assert torch.equal(scales, table_scales)
    assert ((codes == table_codes) | (distance < 0.51 * TABLE_STEP)).all()


def test_they_read_the_state_that_a_step_leaves():
    """After three steps, from zero: what they decode is what the step would decode next."""
    case = Case.random(1000, Formats(torch.bfloat16, WEIGHTS_SPLIT, "8bit"))
    for isa in ISAS:
        for step in (1.0, 2.0, 3.0):
            case.run(scalars_at(step), isa)
    for name, ours, unsigned in zip(("momentum", "variance"), case.state(), (False, True), strict=True):
        theirs = they_read(case[name], case[f"{name}_scale"], their_map(unsigned))
        assert theirs.unique().numel() > 100
        torch.testing.assert_close(ours, theirs, rtol=3e-6, atol=0)


def test_a_step_goes_on_from_the_state_that_they_wrote():
    start = Case.random(1000, Formats(torch.bfloat16, WEIGHTS_SPLIT, "8bit"), seed=1)
    for name, unsigned in (("momentum", False), ("variance", True)):
        codes, scales = they_write(draw(1000, 2, unsigned=unsigned, spread=1.0), unsigned)
        start[name].copy_(codes)
        start[f"{name}_scale"].copy_(scales)
    expected = start.defined(scalars_at())
    for isa in ISAS:
        start.clone().run(scalars_at(), isa).assert_same(expected)
