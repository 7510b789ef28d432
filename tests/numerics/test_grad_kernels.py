"""The compiled gradient kernels against their definition, across ISAs and threads, and what memory they take."""

import itertools
import math
from array import array
from typing import NamedTuple

import numpy as np
import pytest
import torch
from adam_bench.memory import peak_bytes, reset_peak
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cxl.native import _grads
from lightning_cxl.optim.kernels import GRAD_FORMATS
from tests.numerics.adam_case import ISAS, equal_bits
from tests.numerics.reference import gradients as grad_reference

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KEY = 0x9E3779B97F4A7C15
PIECE = grad_reference.PIECE
SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000]
QUARTER = PIECE // grad_reference.QUARTERS
PIECE_SIZES = [QUARTER - 1, QUARTER, QUARTER + 1, 2 * QUARTER + 600, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 100]
# zeros, denormals, a normal, the largest, infinities, NaN: quiet, signalling, and with all bits set
SPECIAL = [0, 1 << 31, 1, 0x80000001, 0x007FFFFF, 0x33800000, 0x3F800000, 0x7F7FFFFF, 0xFF7FFFFF]
NOT_FINITE = [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF]


class Case(NamedTuple):
    name: str
    source: torch.dtype
    destination: torch.dtype | None = None

    def define(self, source, destination, key=KEY):
        if self.name == "measure":
            return grad_reference.sum_of_squares(source)
        if self.name == "accumulate":
            return grad_reference.accumulate(source, destination, key)
        return grad_reference.sum_of_squares(destination.copy_(source))

    def run(self, spans, isa, num_threads=1):
        results = array("d", [-1.0] * len(spans))
        table = array("Q", [number for span in spans for number in span])
        getattr(_grads, self.name)(table, results, num_threads, isa)
        return results


COPIES = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP16, FP32)]
CASES = [Case("measure", dtype) for dtype in (FP32, BF16, FP16)] + [Case("copy", *dtypes) for dtypes in COPIES]
CASES += [Case("accumulate", source, to) for source in (FP32, BF16, FP16) for to in (FP32, BF16)]
IDS = ["-".join(str(part).removeprefix("torch.") for part in case if part) for case in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=IDS)


def values(size, dtype, seed, *, special=False):
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


def span(source, destination=None, key=KEY):
    """The row of one span; without a destination its format and the key are nonsense on purpose."""
    row = [source.data_ptr(), 0, source.numel(), GRAD_FORMATS[source.dtype], 77, key]
    if destination is not None:
        row[1], row[4] = destination.data_ptr(), GRAD_FORMATS[destination.dtype]
    return row


def start_of(case, size, seed, *, special=False):
    return None if case.destination is None else values(size, case.destination, seed, special=special)


def copied(tensor):
    return None if tensor is None else tensor.clone()


def check(case, source, around, part=slice(None), threads=(1,)):
    """One span gives what the definition gives, and writes to nothing but its part of what is around it."""
    expected, before = copied(around), source.clone()
    total = case.define(source, None if expected is None else expected[part])
    for isa, num_threads in itertools.product(ISAS, threads):
        now = copied(around)
        (result,) = case.run([span(source, None if now is None else now[part])], isa, num_threads)
        assert result == total or (math.isnan(result) and math.isnan(total)), (result, total)
        assert now is None or equal_bits(now, expected).all()
        assert equal_bits(source, before).all()


@every_case
@pytest.mark.parametrize("special", [False, True])
def test_equals_the_definition_at_every_size(case, special):
    for size in SIZES:
        check(case, values(size, case.source, size, special=special), start_of(case, size, size + 1, special=special))


@every_case
def test_equals_the_definition_around_the_size_of_a_piece(case):
    for size in PIECE_SIZES:
        check(case, values(size, case.source, size), start_of(case, size, size + 1), threads=(1, 2, 3))


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
    check(case, source, around, slice(offsets[1], offsets[1] + size), (num_threads,))


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
    alone = [*map(copied, starts)]
    rows = [span(*tensors, key=seed * index) for index, tensors in enumerate(zip(sources, alone, strict=True))]
    totals = [case.run([row], ISAS[0])[0] for row in rows]
    for isa in ISAS:
        now = [*map(copied, starts)]
        rows = [span(*tensors, key=seed * index) for index, tensors in enumerate(zip(sources, now, strict=True))]
        assert list(case.run(rows, isa, num_threads)) == totals
        assert all(a is None or equal_bits(a, b).all() for a, b in zip(now, alone, strict=True))


def test_hundreds_of_small_spans():
    tensors = [values(1 + index % 90, BF16, index) for index in range(700)]
    totals = [grad_reference.sum_of_squares(tensor) for tensor in tensors]
    for isa in ISAS:
        for num_threads in (1, 2, 3):
            assert list(Case("measure", BF16).run([span(tensor) for tensor in tensors], isa, num_threads)) == totals


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
    for num_threads, isa, message in ((0, "baseline", "must be at least 1, got 0"), (1, "sse9", "cannot be used")):
        with pytest.raises(ValueError, match=message):
            _grads.measure(array("Q"), array("d"), num_threads, isa)


def test_measuring_takes_no_memory():
    size = 1 << 26  # 128 MiB, of which a float32 copy would take twice as much
    source = torch.ones(size, dtype=BF16)
    table, results = array("Q", [source.data_ptr(), 0, size, 1, 0, 0]), array("d", [0.0])
    for isa in ISAS:
        _grads.measure(table, results, 2, isa)  # threads have their stacks now
        try:
            reset_peak()
        except OSError:
            pytest.skip("the kernel does not let this process reset its peak")
        before = peak_bytes()
        _grads.measure(table, results, 2, isa)
        assert peak_bytes() - before <= 1 << 20
        assert results[0] == size
