"""The compiled Adam kernel against its definition: every combination of formats, size, value and instruction set."""

import re
import shutil
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.native import _adam, _cpu, _grads
from lightning_cxl.optim import kernels as formats
from lightning_cxl.optim.parameter_state import AdamScalars
from tests.numerics.adam_case import (
    COMBINATIONS,
    FIELDS,
    ISAS,
    PLAIN,
    TENSORS,
    Case,
    Formats,
    equal_bits,
    examples,
    scalars_at,
    seeds,
    step_scalars,
    update,
)
from tests.wide_instructions import functions_with_avx

SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000]
CHUNK_SIZES = [65535, 65536, 65537]
TILE_SIZES = [1023, 1024, 1025]  # of 8-bit state
UNUSUAL = {"betas": (0.3, 0.9), "decoupled": False, "grad_scale": 0.37}


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
@pytest.mark.parametrize("special", [False, True])
def test_equals_the_definition_at_every_size(combination, special):
    sizes = SIZES + (TILE_SIZES if combination.state == "8bit" else [])
    for size in sizes:
        scalars = scalars_at(**(UNUSUAL if size % 2 == special else {}))
        start = Case.random(size, combination, size, special=special)
        expected = start.defined(scalars)
        for isa in ISAS:
            start.clone().run(scalars, isa).assert_same(expected, (size, isa))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_equals_the_definition_around_the_size_of_a_chunk(combination):
    for size in CHUNK_SIZES:
        start = Case.random(size, combination, size, special=True)
        expected = start.defined(scalars_at())
        start.clone().run(scalars_at(), ISAS[-1], num_threads=2).assert_same(expected, size)


@examples(250)
@given(
    size=st.integers(0, 600),
    combination=st.sampled_from(COMBINATIONS),
    seed=seeds,
    scalars=step_scalars,
    special=st.booleans(),
    fill=st.sampled_from([1, 1e-6, 1e-19, 1e-37, 1e15]),
)
def test_equals_the_definition_for_any_hyper_parameters(size, combination, seed, scalars, special, fill):
    start = Case.random(size, combination, seed, special=special, fill=fill)
    expected = start.defined(scalars)
    for isa in ISAS:
        start.clone().run(scalars, isa).assert_same(expected, isa)


@examples(60)
@given(combination=st.sampled_from(COMBINATIONS), seed=seeds, options=st.lists(step_scalars, min_size=3, max_size=3))
def test_several_steps_equal_the_definition(combination, seed, options):
    """Every step starts from what the one before made: state stays in its format throughout."""
    ours = Case.random(300, combination, seed)
    expected = ours.clone()
    for scalars in options:
        expected = expected.defined(scalars)
        ours.run(scalars)
    ours.assert_same(expected)


@examples(60)
@given(combination=st.sampled_from(COMBINATIONS), seed=seeds, step=st.integers(1, 10**6), l2=st.booleans())
def test_learning_rate_zero_changes_the_state_only(combination, seed, step, l2):
    scalars = scalars_at(float(step), lr=0.0, weight_decay=0.1 if l2 else 0.0, decoupled=not l2)
    start = Case.random(400, combination, seed)
    new = start.clone().run(scalars)
    # 0 * NaN would be NaN: the variance must not have become so
    assert torch.equal(new.master().view(torch.int32), start.master().view(torch.int32))
    assert not torch.equal(new["momentum"], start["momentum"])


class Guarded:
    """A case whose tensors lie between bytes that nobody may change, each one element away from an aligned address."""

    MARK = 0xA5

    def __init__(self, case: Case) -> None:
        tensors: dict[str, torch.Tensor | None] = dict.fromkeys(TENSORS)
        self.buffers = []
        for name, tensor in case.tensors.items():
            if tensor is None:
                continue
            size, lead = tensor.nbytes, 64 + tensor.element_size()
            memory = torch.full((64 + lead + size + 128,), self.MARK, dtype=torch.uint8)
            start = lead + -memory.data_ptr() % 64
            tensors[name] = memory[start : start + size].view(tensor.dtype).copy_(tensor)
            assert size == 0 or tensors[name].data_ptr() % 64 == tensor.element_size()
            self.buffers += [memory[:start], memory[start + size :]]
        self.case = Case(case.formats, case.key, tensors)

    def assert_intact(self, context: object) -> None:
        for buffer in self.buffers:
            assert (buffer == self.MARK).all(), context


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_unaligned_tensors_are_updated_and_nothing_outside_is_written(combination):
    for size in (0, 1, 15, 16, 17, 33, 255, 257, 1025):
        start = Case.random(size, combination, size)
        expected = start.defined(scalars_at())
        for isa in ISAS:
            guarded = Guarded(start)
            guarded.case.run(scalars_at(), isa, num_threads=2)
            guarded.assert_intact((size, isa))
            guarded.case.assert_same(expected, (size, isa))
            assert torch.equal(guarded.case["grads"], start["grads"])
            assert size == 0 or not torch.equal(guarded.case.state()[0], start.state()[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row": 2}, "span 1 names row 2 of 2 rows"),
        ({"row": 2**64 - 1}, "span 1 names row -1"),
        ({"formats": 3}, "unknown formats 3"),
        ({"formats": 3 << 4}, "unknown formats 48"),
        ({"formats": 1 << 10}, "unknown formats 1024"),
        ({"formats": 2**64 - 1}, "unknown formats -1"),
        ({"numel": 2**63}, "span 1 has -9223372036854775808 elements"),
        ({"team": 1024}, "team 1024 of at most 1024 teams"),
        ({"team": 2**64 - 1}, "team -1"),
        ({"cpus": [0]}, "pairs of team and CPU, got 1"),
        ({"cpus": [1024, 0]}, "CPU 0 of team 1024: at most 1024 teams and 1024 CPUs"),
        ({"cpus": [-1, 0]}, "CPU 0 of team -1"),
        ({"cpus": [0, 1024]}, "CPU 1024 of team 0"),
        ({"cpus": [0, -1]}, "CPU -1 of team 0"),
        ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
        ({"num_threads": -3}, "num_threads must be at least 1, got -3"),
        ({"isa": "sse9"}, "isa 'sse9' cannot be used: this CPU supports baseline"),
        ({"isa": None}, "isa None cannot be used"),
        ({"first": 1}, "span 1 begins at element 1: it must be a multiple of 65536"),
        ({"first": 2**64 - 65536}, "span 1 begins at element -65536"),
        ({"cut": 1}, "14 numbers per span and 9 per row of scalars, got 27 and 18"),
        ({"cut_scalars": 1}, "14 numbers per span and 9 per row of scalars, got 28 and 17"),
        ({"cut_scalars": 18}, "span 0 names row 0 of 0 rows"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(changes, message):
    good, bad = Case.random(300, seed=1), Case.random(300, seed=2)
    before = good.clone(), bad.clone()
    second = dict(zip(FIELDS, bad.span(), strict=True)) | {k: v for k, v in changes.items() if k in FIELDS}
    table = array("Q", [*good.span(), *second.values()])
    scalars = array("f", [*scalars_at(), *scalars_at()])
    with pytest.raises(ValueError, match=re.escape(message)):
        _adam.update(
            table[: len(table) - changes.get("cut", 0)],
            scalars[: len(scalars) - changes.get("cut_scalars", 0)],
            changes.get("num_threads", 1),
            changes.get("isa", "baseline"),
            array("q", changes["cpus"]) if "cpus" in changes else None,
        )
    for now, then in zip((good, bad), before, strict=True):
        now.assert_same(then)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_every_address_that_a_format_needs_must_be_there(combination):
    good = Case.random(300, combination, 1)
    other = good.clone()
    before = good.clone()
    for index, name in enumerate(TENSORS):
        if good.tensors[name] is None:
            continue  # it may be missing: so it is in all tests of this combination
        table = array("Q", [*other.span(), *good.span()])
        table[_adam.SPAN_FIELDS + index] = 0
        with pytest.raises(ValueError, match="span 1 of 300 elements has a null address"):
            _adam.update(table, array("f", scalars_at()), 2, "baseline")
        other.assert_same(before, name)


def test_a_span_of_no_elements_needs_no_address():
    other = Case.random(100)
    expected = other.defined(scalars_at())
    code = Formats(torch.bfloat16, formats.WEIGHTS_SPLIT, "8bit").code
    empty = [{"key": 7, "formats": code}.get(field, 0) for field in FIELDS]
    update([empty, other.span(), empty], [scalars_at()])
    other.assert_same(expected)
    update([empty], [scalars_at()])
    update([], [])


def test_extreme_but_finite_scalars():
    """What float32 rounds to zero or infinity is rounded before it is used, as in the definition."""
    for extreme in (1e-46, 1e-300, 3e38, 1e300):
        for field in AdamScalars._fields:
            scalars = scalars_at()._replace(**{field: torch.tensor(extreme, dtype=torch.float64).float().item()})
            for combination in (PLAIN, Formats(torch.bfloat16, formats.WEIGHTS_SPLIT, "8bit")):
                start = Case.random(40, combination)
                expected = start.defined(scalars)
                for isa in ISAS:
                    start.clone().run(scalars, isa).assert_same(expected, (field, extreme, isa))


def test_step_counts_are_read_before_an_update_and_stored_after_it():
    steps = torch.tensor([0.0, 41.0])
    values, addresses = array("f", [0.0, 0.0]), array("Q", [steps.data_ptr(), steps.data_ptr() + 4])
    _adam.next_steps(addresses, values)
    assert (steps.tolist(), list(values)) == ([0.0, 41.0], [1.0, 42.0])
    _adam.store_steps(addresses, values)
    assert steps.tolist() == [1.0, 42.0]
    for function in (_adam.next_steps, _adam.store_steps):
        with pytest.raises(ValueError, match="1 addresses and room for 2"):
            function(addresses[:1], values)
        with pytest.raises(ValueError, match="null address"):
            function(array("Q", [steps.data_ptr(), 0]), array("f", [7.0, 7.0]))
    assert steps.tolist() == [1.0, 42.0]


def test_the_tables_are_as_wide_as_the_fields_that_are_known():
    assert len(FIELDS) == _adam.SPAN_FIELDS and len(AdamScalars._fields) == _adam.SCALAR_FIELDS


def test_equal_bits_tells_zeros_apart_and_nans_not():
    a = torch.tensor([0.0, float("nan"), 1.0, float("inf")])
    b = torch.tensor([-0.0, -float("nan"), 1.0, 3e38])
    assert equal_bits(a, b).tolist() == [False, True, True, False]


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize(
    ("module", "pattern"),
    [(_adam, r"_avx(2|512)(\.|$)"), (_cpu, r"_avx(2|512)(\.|$)"), (_grads, r"grads_\w+_avx(2|512)")],
    ids=["adam", "cpu", "grads"],
)
def test_no_wide_instruction_outside_the_functions_for_that_isa(module, pattern):
    """An AVX instruction in common code would stop older CPUs with SIGILL."""
    kernels, offenders = functions_with_avx(module, pattern)
    if module is not _cpu and not kernels:
        pytest.skip("the extension was stripped of its symbols")
    assert not offenders
