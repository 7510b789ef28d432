"""The compiled gradient kernels against their definition, across instruction sets and thread counts."""

import math
from array import array
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cxl.native import _cpu, _grads
from lightning_cxl.optim.kernels import GRAD_FORMATS
from tests.numerics.reference import gradients as grad_reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ISAS = _cpu.supported_isas()
KEY = 0x9E3779B97F4A7C15
PIECE = grad_reference.PIECE
SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000]
QUARTER = PIECE // grad_reference.QUARTERS
PIECE_SIZES = [QUARTER - 1, QUARTER, QUARTER + 1, 2 * QUARTER + 600, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 100]
# zeros, denormals, a normal, the largest, infinities, NaN: quiet, signalling, and with all bits set
SPECIAL = [0, 1 << 31, 1, 0x80000001, 0x007FFFFF, 0x33800000, 0x3F800000, 0x7F7FFFFF, 0xFF7FFFFF]
NOT_FINITE = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF]


class Case(NamedTuple):
    """An operation with the dtypes of its source and destination."""

    name: str
    source: torch.dtype
    destination: torch.dtype | None = None

    def define(self, source: torch.Tensor, destination: torch.Tensor | None, key: int = KEY) -> float:
        """Do it in plain torch."""
        if self.name == "measure":
            return grad_reference.sum_of_squares(source)
        if self.name == "accumulate":
            return grad_reference.accumulate(source, destination, key)
        return grad_reference.copy(source, destination)

    def run(self, spans: list[list[int]], isa: str, num_threads: int = 1) -> array:
        results = array("d", [-1.0] * len(spans))
        table = array("Q", [number for span in spans for number in span])
        getattr(_grads, self.name)(table, results, num_threads, isa)
        return results


COPIES = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP16, FP32)]
SUMS = [(source, to) for source in (FP32, BF16, FP16) for to in (FP32, BF16)]
CASES = [Case("measure", dtype) for dtype in (FP32, BF16, FP16)]
CASES += [Case("copy", *dtypes) for dtypes in COPIES]
CASES += [Case("accumulate", *dtypes) for dtypes in SUMS]
IDS = ["-".join(str(part).removeprefix("torch.") for part in case if part) for case in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=IDS)


def values(size: int, dtype: torch.dtype, seed: int, *, special: bool = False) -> torch.Tensor:
    """Random numbers of many magnitudes; with `special`, many are none."""
    rng = np.random.default_rng(seed)
    numbers = (rng.standard_normal(size) * 10.0 ** rng.uniform(-8, 4, size)).astype(np.float32)
    if special:
        mask = rng.random(size) < 0.4
        numbers[mask] = rng.choice(np.array(SPECIAL + NOT_FINITE, dtype=np.uint32), mask.sum()).view(np.float32)
    if dtype == FP32:
        return torch.from_numpy(numbers)
    if special and dtype == BF16:
        return torch.from_numpy((numbers.view(np.uint32) >> 16).astype(np.int16)).view(BF16)
    return torch.from_numpy(numbers).to(dtype)


def span(source: torch.Tensor, destination: torch.Tensor | None = None, key: int = KEY) -> list[int]:
    """The row of one span; without a destination its format and the key are nonsense on purpose."""
    row = [source.data_ptr(), 0, source.numel(), GRAD_FORMATS[source.dtype], 77, key]
    if destination is not None:
        row[1], row[4] = destination.data_ptr(), GRAD_FORMATS[destination.dtype]
    return row


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Every bit equal, so -0.0 is not 0.0; one NaN is as good as another."""
    integer = torch.int32 if a.dtype == FP32 else torch.int16
    return bool(((a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())).all())


def same_sum(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def check(case: Case, source: torch.Tensor, start: torch.Tensor | None, isa: str, num_threads: int) -> None:
    """One span gives what the definition gives."""
    destination = None if start is None else start.clone()
    before = source.clone()
    expected = None if start is None else start.clone()
    total = case.define(source, expected)
    (result,) = case.run([span(source, destination)], isa, num_threads)
    assert same_sum(result, total), (result, total)
    assert same_bits(source, before)
    assert expected is None or same_bits(destination, expected)


def start_of(case: Case, size: int, seed: int, *, special: bool = False) -> torch.Tensor | None:
    return None if case.destination is None else values(size, case.destination, seed, special=special)


@every_case
@pytest.mark.parametrize("special", [False, True])
def test_equals_the_definition_at_every_size(case, special):
    for size in SIZES:
        source, start = (
            values(size, case.source, size, special=special),
            start_of(case, size, size + 1, special=special),
        )
        for isa in ISAS:
            check(case, source, start, isa, 1)


@every_case
def test_equals_the_definition_around_the_size_of_a_piece(case):
    for size in PIECE_SIZES:
        source, start = values(size, case.source, size), start_of(case, size, size + 1)
        destination = None if start is None else start.clone()
        total = case.define(source, destination)
        for isa in ISAS:
            for num_threads in (1, 2, 3):
                now = None if start is None else start.clone()
                assert case.run([span(source, now)], isa, num_threads)[0] == total
                assert now is None or same_bits(now, destination)


@settings(max_examples=80)
@given(
    case=st.sampled_from(CASES),
    size=st.integers(0, 300),
    seed=st.integers(0, 2**31),
    offsets=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    special=st.booleans(),
    num_threads=st.integers(1, 3),
)
def test_equals_the_definition_at_any_address_and_writes_nothing_else(case, size, seed, offsets, special, num_threads):
    source = values(400, case.source, seed, special=special)[offsets[0] : offsets[0] + size]
    around = start_of(case, 400, seed + 1, special=special)
    expected = None if around is None else around.clone()
    part = slice(offsets[1], offsets[1] + size)
    total = case.define(source, None if expected is None else expected[part])
    for isa in ISAS:
        now = None if around is None else around.clone()
        (result,) = case.run([span(source, None if now is None else now[part])], isa, num_threads)
        assert same_sum(result, total)
        assert now is None or same_bits(now, expected)


@settings(max_examples=40)
@given(
    case=st.sampled_from(CASES),
    sizes=st.lists(st.integers(0, 150_000) | st.integers(0, 70), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
    num_threads=st.integers(1, 9),
)
def test_many_spans_in_one_call_equal_one_call_each(case, sizes, seed, num_threads):
    sources = [values(size, case.source, seed + index) for index, size in enumerate(sizes)]
    starts = [start_of(case, size, seed + 100 + index) for index, size in enumerate(sizes)]
    alone = [None if start is None else start.clone() for start in starts]
    rows = [span(*tensors, key=seed * index) for index, tensors in enumerate(zip(sources, alone, strict=True))]
    totals = [case.run([row], ISAS[0])[0] for row in rows]
    for isa in ISAS:
        now = [None if start is None else start.clone() for start in starts]
        rows = [span(*tensors, key=seed * index) for index, tensors in enumerate(zip(sources, now, strict=True))]
        assert list(case.run(rows, isa, num_threads)) == totals
        assert all(a is None or same_bits(a, b) for a, b in zip(now, alone, strict=True))


def test_hundreds_of_small_spans():
    tensors = [values(1 + index % 90, BF16, index) for index in range(700)]
    totals = [grad_reference.sum_of_squares(tensor) for tensor in tensors]
    for isa in ISAS:
        for num_threads in (1, 2, 3):
            assert list(Case("measure", BF16).run([span(tensor) for tensor in tensors], isa, num_threads)) == totals


@pytest.mark.parametrize("size", [1, 40, 1000, PIECE + 77, 5 * PIECE])
def test_sums_are_as_exact_as_documented(size):
    source = values(size, FP32, size)
    exact = math.fsum((source.double() ** 2).tolist())
    (total,) = Case("measure", FP32).run([span(source)], ISAS[-1], 2)
    pieces = -(-size // PIECE)
    assert abs(total - exact) <= exact * (2057 + pieces) * 2.0**-53
    assert abs(total - exact) <= exact * 1e-12


@settings(max_examples=30)
@given(size=st.integers(0, 500), seed=st.integers(0, 2**31), dtype=st.sampled_from([BF16, FP16]))
def test_a_sum_does_not_depend_on_the_format(size, seed, dtype):
    half = values(size, dtype, seed)
    full = half.float()
    for isa in ISAS:
        assert Case("measure", dtype).run([span(half)], isa) == Case("measure", FP32).run([span(full)], isa)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_sum_is_finite_if_and_only_if_every_element_is(dtype):
    size = PIECE + 40  # blocks, a tail, a second piece
    source = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    for isa in ISAS:
        assert Case("measure", dtype).run([span(source)], isa, 2)[0] == pytest.approx(
            size * torch.finfo(dtype).max ** 2
        )
        for place in (0, 1, 17, 33, QUARTER - 1, QUARTER, PIECE - 1, PIECE, PIECE + 31, PIECE + 32, size - 1):
            for bad in (math.inf, -math.inf, math.nan):
                source[place] = bad
                (total,) = Case("measure", dtype).run([span(source)], isa, 2)
                assert math.isnan(total) if math.isnan(bad) else total == math.inf
                source[place] = torch.finfo(dtype).max


@pytest.mark.parametrize(("dtype", "smallest"), [(FP32, 2.0**-149), (BF16, 2.0**-133), (FP16, 2.0**-24)])
def test_a_sum_is_zero_if_and_only_if_every_element_is(dtype, smallest):
    source = torch.zeros(1000, dtype=dtype)
    source[::2] = -0.0
    for isa in ISAS:
        assert Case("measure", dtype).run([span(source)], isa)[0] == 0.0
        for place in (0, 31, 999):
            source[place] = smallest
            assert Case("measure", dtype).run([span(source)], isa)[0] == smallest**2
            source[place] = 0.0


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_float32_accumulators_and_copies_are_those_of_torch(dtype):
    source, start = values(1000, dtype, 1), values(1000, FP32, 2)
    for isa in ISAS:
        total, copied = start.clone(), torch.empty(1000)
        Case("accumulate", dtype, FP32).run([span(source, total)], isa)
        Case("copy", dtype, FP32).run([span(source, copied)], isa)
        assert torch.equal(total, start.clone().add_(source))
        assert torch.equal(copied, source.float())


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_bfloat16_accumulators_take_a_neighbour_and_are_right_on_average(dtype):
    size, num_keys = 64, 4000
    source, start = values(size, dtype, 3), values(size, BF16, 4)
    exact = start.float() + source.float()
    upper = exact.view(torch.int32) & -65536
    toward_zero = upper.view(FP32)
    away = (upper + 65536).view(FP32)
    spans, sums = [], start.expand(num_keys, size).contiguous()
    for number, row in enumerate(sums):
        spans.append(span(source, row, key=(number * 0x9E3779B97F4A7C15) % 2**64))
    Case("accumulate", dtype, BF16).run(spans, ISAS[-1], 2)
    assert ((sums == toward_zero) | (sums == away)).all()
    gap = (away - toward_zero).abs().double()
    chance = (exact - toward_zero).abs().double() / gap  # of the neighbour away from zero
    found = (sums == away).double().mean(0)
    deviation = (chance * (1 - chance) / num_keys).sqrt()
    assert ((found - chance).abs() <= 5 * deviation + 2.0**-16).all()


def test_random_bits_depend_on_key_and_position_and_on_nothing_else():
    source, start = torch.full((3 * PIECE,), 0.3, dtype=BF16), torch.ones(3 * PIECE, dtype=BF16)
    sums = {}
    for key in (0, 1, 1 << 32):
        for isa in ISAS:
            for num_threads in (1, 2, 3):
                now = start.clone()
                Case("accumulate", BF16, BF16).run([span(source, now, key)], isa, num_threads)
                assert same_bits(now, sums.setdefault(key, now))
        ups = (sums[key] > 1.3).view(-1, PIECE)
        assert not torch.equal(ups[0], ups[1])
        assert not torch.equal(sums[key][0::2], sums[key][1::2])
    assert not torch.equal(sums[0], sums[1]) and not torch.equal(sums[0], sums[1 << 32])


def test_flushing_denormals_is_the_callers_choice_on_every_thread():
    """Float16 denormals are normal float32."""
    size, tiny = 400_000, {FP32: 1e-40, BF16: 1e-40, FP16: 1e-6}
    for dtype, flushed in ((FP32, True), (BF16, True), (FP16, False)):
        source = torch.full((size,), tiny[dtype], dtype=dtype)
        for isa in ISAS:
            assert Case("measure", dtype).run([span(source)], isa, 4)[0] > 0
            assert torch.set_flush_denormal(True)
            try:
                assert (Case("measure", dtype).run([span(source)], isa, 4)[0] == 0) == flushed
            finally:
                torch.set_flush_denormal(False)


GOOD = [4096, 8192, 8, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("measure", [4096, 0, 8, 0, 0], "6 numbers per span and one result each, got 5 and 1"),
        ("measure", GOOD * 2, "got 12 and 1"),
        ("measure", GOOD, "measuring writes nothing"),
        ("measure", [0, 0, 8, 0, 0, 0], "null address"),
        ("measure", [4098, 0, 8, 0, 0, 0], "not a multiple"),
        ("measure", [4097, 0, 8, 1, 0, 0], "not a multiple"),
        ("measure", [4096, 0, 8, 3, 0, 0], "format 3, which does not exist"),
        ("measure", [4096, 0, 2**47, 0, 0, 0], "more than there can be"),
        ("copy", [4096, 0, 8, 0, 0, 0], "null address"),
        ("copy", [4096, 8194, 8, 1, 0, 0], "not a multiple"),
        ("copy", [4096, 8192, 8, 0, 1, 0], "cannot be copied to format 1"),
        ("copy", [4096, 8192, 8, 2, 1, 0], "cannot be copied to format 1"),
        ("copy", [4096, 4096, 8, 0, 0, 0], "overlaps its own destination"),
        ("copy", [4096, 4126, 16, 1, 1, 0], "overlaps its own destination"),
        ("accumulate", [4096, 8192, 8, 2, 2, 0], "accumulator of format 2"),
        ("accumulate", [4126, 4096, 8, 1, 0, 0], "overlaps its own destination"),
    ],
)
def test_bad_tables_are_refused_before_anything_is_written(name, row, message):
    """A good span comes first: it stays as it is."""
    source, destination = torch.ones(100), torch.zeros(100)
    first = [source.data_ptr(), 0 if name == "measure" else destination.data_ptr(), 100, 0, 0, 0]
    results = array("d", [-1.0, -1.0])
    with pytest.raises(ValueError, match=message):
        getattr(_grads, name)(array("Q", row), results[:1], 1, "baseline")
    if len(row) == 6:
        with pytest.raises(ValueError, match="span 1 "):
            getattr(_grads, name)(array("Q", first + row), results, 1, "baseline")
    assert not destination.any() and list(results) == [-1.0, -1.0]


def test_bad_threads_and_isas_are_refused():
    for name in ("measure", "copy", "accumulate"):
        with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
            getattr(_grads, name)(array("Q"), array("d"), 0, "baseline")
        with pytest.raises(ValueError, match="isa 'sse9' cannot be used: this CPU supports baseline"):
            getattr(_grads, name)(array("Q"), array("d"), 1, "sse9")
        getattr(_grads, name)(array("Q"), array("d"), 1, "baseline")
