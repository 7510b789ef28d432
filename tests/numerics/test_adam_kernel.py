"""The compiled Adam kernel against its definition, in every combination of formats, and against torch's own Adam."""

import re
import shutil
import subprocess
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.native import _adam, _cpu, _grads, _membench
from lightning_cxl.optim import kernels as formats
from tests.numerics import adam_case
from tests.numerics.adam_case import COMBINATIONS, ISAS, Case, Formats, equal_bits, examples, scalars_at, seeds, update
from tests.numerics.bit_patterns import bfloat16_neighbours, every_upper_half, float32_of, ulp

SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000]
CHUNK_SIZES = [65535, 65536, 65537]
TILE_SIZES = [1023, 1024, 1025]  # of 8-bit state
UNUSUAL = {"betas": (0.3, 0.9), "decoupled": False, "grad_scale": 0.37}


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
@pytest.mark.parametrize("special", [False, True])
def test_equals_the_definition_at_every_size(combination, special):
    for size in SIZES + (TILE_SIZES if combination.state == "8bit" else []):
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
    scalars=adam_case.step_scalars,
    special=st.booleans(),
    fill=st.sampled_from([1, 1e-6, 1e-19, 1e-37, 1e15]),
)
def test_equals_the_definition_for_any_hyper_parameters(size, combination, seed, scalars, special, fill):
    start = Case.random(size, combination, seed, special=special, fill=fill)
    expected = start.defined(scalars)
    for isa in ISAS:
        start.clone().run(scalars, isa).assert_same(expected, isa)


class Guarded:
    """A case whose tensors lie between bytes that nobody may change, each one element away from an aligned address."""

    MARK = 0xA5

    def __init__(self, case: Case) -> None:
        tensors = dict.fromkeys(adam_case.TENSORS)
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
        ({"row": 2}, "span 1 names row 2 of 2 rows"), ({"row": 2**64 - 1}, "span 1 names row -1"),
        ({"formats": 3}, "unknown formats 3"), ({"formats": 3 << 4}, "unknown formats 48"),
        ({"formats": 1 << 10}, "unknown formats 1024"), ({"formats": 2**64 - 1}, "unknown formats -1"),
        ({"numel": 2**63}, "span 1 has -9223372036854775808 elements"),
        ({"team": 1024}, "team 1024 of at most 1024 teams"), ({"team": 2**64 - 1}, "team -1"),
        ({"cpus": [1024, 0]}, "CPU 0 of team 1024: at most 1024 teams and 1024 CPUs"),
        ({"cpus": [0]}, "pairs of team and CPU, got 1"), ({"cpus": [-1, 0]}, "CPU 0 of team -1"),
        ({"cpus": [0, 1024]}, "CPU 1024 of team 0"), ({"cpus": [0, -1]}, "CPU -1 of team 0"),
        ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
        ({"isa": "sse9"}, "isa 'sse9' cannot be used: this CPU supports baseline"),
        ({"first": 1}, "span 1 begins at element 1: it must be a multiple of 65536"),
        ({"first": 2**64 - 65536}, "span 1 begins at element -65536"),
        ({"cut": 1}, "14 numbers per span and 9 per row of scalars, got 27 and 18"),
        ({"cut_scalars": 1}, "14 numbers per span and 9 per row of scalars, got 28 and 17"),
        ({"cut_scalars": 18}, "span 0 names row 0 of 0 rows"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_anything_is_written(changes, message):
    good, bad = Case.random(300, seed=1), Case.random(300, seed=2)
    before = good.clone(), bad.clone()
    own = dict(zip(adam_case.FIELDS, bad.span(), strict=True))
    second = own | {field: changes[field] for field in own.keys() & changes.keys()}
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
    other, before = good.clone(), good.clone()
    for index, name in enumerate(adam_case.TENSORS):
        if good.tensors[name] is None:
            continue  # it may be missing: so it is in all tests of this combination
        table = array("Q", [*other.span(), *good.span()])
        table[_adam.SPAN_FIELDS + index] = 0
        with pytest.raises(ValueError, match="span 1 of 300 elements has a null address"):
            _adam.update(table, array("f", scalars_at()), 2, "baseline")
        other.assert_same(before, name)


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


def functions_with_avx(module):
    """Return the names of the functions of a compiled module that have an AVX instruction."""
    command = ["objdump", "-d", "--no-show-raw-insn", module.__file__]
    function, found = "", set()
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if header := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            function = header[1]
        elif re.search(r"\t\s*v[a-z0-9]+\s|%[yz]mm|%k[0-7]", line):
            found.add(function)
    return found


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize(
    ("module", "kernels"),
    [
        (_adam, r"_avx(2|512)(\.|$)"), (_cpu, r"_avx(2|512)(\.|$)"), (_grads, r"grads_\w+_avx(2|512)"),
        (_membench, r"mem_\w+_avx(2|512)"),
    ],
    ids=["adam", "cpu", "grads", "membench"],
)  # fmt: skip
def test_no_wide_instruction_outside_the_functions_for_that_isa(module, kernels):
    """An AVX instruction in common code would stop older CPUs with SIGILL."""
    found = functions_with_avx(module)
    allowed = {name for name in found if re.search(kernels, name)}
    if module is not _cpu and not allowed:
        pytest.skip("the extension was stripped of its symbols")
    assert found == allowed


PATTERNS = float32_of(every_upper_half(seed=3))
BF16_STATE = Formats(torch.float32, formats.WEIGHTS_FP32, "bf16")


def kept_weights(values: torch.Tensor, weights: int, isa: str, state: formats.StatePrecision = "fp32") -> Case:
    """Apply a step that changes no weight: learning rate 0, and gradients above 0, as -0.0 - 0.0 is -0.0 again."""
    zeros, ones = torch.zeros_like(values), torch.ones_like(values)
    case = Case.of(values, ones, zeros, zeros, Formats(torch.float32, weights, state))
    return case.run(scalars_at(1.0, lr=0.0, weight_decay=0.0), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("state", formats.STATE_FORMATS)
def test_split_master_weights_survive_a_step_bit_for_bit(isa, state):
    case = kept_weights(PATTERNS, formats.WEIGHTS_SPLIT, isa, state)
    assert equal_bits(case.master(), PATTERNS).all()
    assert equal_bits(case["compute"], formats.split(PATTERNS)[0]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_compute_weights_are_those_of_split_masters_and_float16_ones_are_rounded_as_torch_does(isa):
    """To float16 to nearest, ties to even; denormals, overflow to infinity, NaN stays NaN."""
    compute = {formats.WEIGHTS_BF16: formats.split(PATTERNS)[0], formats.WEIGHTS_FP16: PATTERNS.half()}
    for weights, expected in compute.items():
        case = kept_weights(PATTERNS, weights, isa)
        assert equal_bits(case["compute"], expected).all()
        assert equal_bits(case["weights"], PATTERNS).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_read_exactly(isa, dtype):
    """With beta1 = 0 the momentum is the gradient, unless that is infinite: infinity * 0 is NaN. So 0.9 for these."""
    grads = torch.arange(2**16).short().view(dtype)
    zeros = torch.zeros(2**16)
    for betas, chosen in (((0.0, 0.999), grads.isfinite()), ((0.9, 0.999), ~grads.isfinite())):
        case = Case.of(zeros, zeros, zeros, zeros, Formats(dtype, formats.WEIGHTS_FP32, "fp32"))
        case["grads"].copy_(grads)
        case.run(scalars_at(betas=betas), isa)
        assert equal_bits(case["momentum"], grads.float())[chosen].all()


def test_rounding_of_state_depends_on_key_and_element_only():
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


torch_options = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-6, 1.0),
        "betas": st.tuples(st.floats(0, 0.9999), st.floats(0, 0.99999)),
        "eps": st.sampled_from([1e-8, 1e-6]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
        "decoupled": st.booleans(),
        "grad_scale": st.sampled_from([1.0, 2.0**-10, 0.3]),
    }
)


needs_fma_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch fuses multiply and add only in its AVX2 and AVX-512 kernels",
)


def torch_update(case: Case, step: float, **options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of torch's own optimizer on float32 copies: new weights, momentum and variance."""
    momentum, variance = (t.clone() for t in case.state())
    parameter = torch.nn.Parameter(case.master().clone())
    # what torch's own GradScaler does before the step
    parameter.grad = case["grads"].float() * torch.tensor(options.pop("grad_scale"))
    decoupled = options.pop("decoupled")
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([parameter], foreach=False, **options)
    optimizer.state[parameter] = {"step": torch.tensor(step - 1), "exp_avg": momentum, "exp_avg_sq": variance}
    optimizer.step()
    return parameter.detach(), momentum, variance


def assert_stored(new: Case, momentum: torch.Tensor, variance: torch.Tensor) -> None:
    """The moments are torch's bit for bit, as the format of the state keeps them.

    But for the sign of zero: with beta1 = 0 and a gradient of -0 torch's own vectors give 0, its scalar tail -0.
    """
    for name, values in (("momentum", momentum + 0.0), ("variance", variance + 0.0)):  # -0 + 0 is 0
        stored = new[name]
        if new.formats.state == "8bit":
            codes, scales = torch.empty_like(stored), torch.empty_like(new[f"{name}_scale"])
            _adam.quantize(values.numpy(), codes.numpy(), scales.numpy(), name == "variance", "baseline")
            assert torch.equal(stored, codes) and torch.equal(new[f"{name}_scale"], scales)
        elif new.formats.state == "bf16":
            towards, away = bfloat16_neighbours(values)
            assert (equal_bits(stored + 0.0, towards) | equal_bits(stored + 0.0, away)).all()
        else:
            assert equal_bits(stored + 0.0, values).all()


def assert_within_2_ulp(new: Case, start: Case, theirs: torch.Tensor) -> None:
    """2 ulp of the weight; where the update is so large that it may cancel the weight, 4 ulp of the larger of the two.

    Torch's ``sqrt`` is off by up to one ulp, which its later roundings make four of the update. With 16- and 8-bit
    state our formula is another one, whose roundings come on top of torch's: 3 and 8.
    """
    of_weight, of_update = (2, 4) if start.formats.state == "fp32" else (3, 8)
    before = start.master()
    update = (theirs - before).abs()
    difference = (new.master().double() - theirs.double()).abs()
    small = update <= theirs.abs() / 4
    assert (difference <= of_weight * ulp(theirs))[small].all()
    assert (difference <= of_update * torch.maximum(ulp(update), ulp(before)))[~small].all()


@needs_fma_torch
@examples(100)
@given(
    combination=st.sampled_from(COMBINATIONS),
    seed=seeds,
    step=st.integers(1, 10**5),
    options=torch_options,
    fill=st.sampled_from([1, 0.1, 1e-6]),
)
def test_is_within_2_ulp_of_torch(combination, seed, step, options, fill):
    start = Case.random(1001, combination, seed, fill=fill)
    new = start.clone().run(adam_case.step_scalars_of(float(step), **options))
    theirs, momentum, variance = torch_update(start, float(step), **options)
    assert_stored(new, momentum, variance)
    assert_within_2_ulp(new, start, theirs)


@needs_fma_torch
@examples(100)
@given(
    size=st.integers(1, 300),
    combination=st.sampled_from([c for c in COMBINATIONS if c.state == "fp32"]),
    seed=seeds,
    step=st.integers(1, 10**5),
    options=torch_options,
    fill=st.sampled_from([1, 1e-6, 1e-19, 1e-37, 1e15]),
    ratio=st.sampled_from([0, 8, 30]),
)
def test_is_torch_bit_for_bit_once_torch_rounds_sqrt_correctly(size, combination, seed, step, options, fill, ratio):
    """Also where weights, gradients and moments are of very different sizes, denormals among them."""
    start = Case.random(size, combination, seed, fill=fill, ratio=ratio)
    new = start.clone().run(adam_case.step_scalars_of(float(step), **options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", lambda x: x.double().pow(0.5).float())
        theirs, momentum, variance = torch_update(start, float(step), **options)
    assert_stored(new, momentum, variance)
    assert equal_bits(new.master(), theirs).all()
