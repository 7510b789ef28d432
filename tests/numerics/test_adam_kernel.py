"""The compiled Adam kernel against its definition, against torch, across instruction sets and thread counts."""

import re
import shutil
import subprocess
from array import array
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cxl import _adam, _cpu
from lightning_cxl.optim.reference import AdamScalars, adam_update, fused_multiply_add

ISAS = _cpu.supported_isas()
SIZES = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000]
CHUNK_SIZES = [65535, 65536, 65537]
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39, 1.1754944e-38, 1.0, -1.0, 3.4028235e38, -3.4028235e38]
SPECIAL += [1e-20, 1e19, -1e30, float("inf"), float("-inf"), float("nan")]

step_scalars = st.builds(
    AdamScalars.at_step,
    st.integers(1, 10**6).map(float),
    lr=st.floats(0, 10),
    betas=st.tuples(st.floats(0, 0.999999), st.floats(0, 0.999999)),
    eps=st.sampled_from([0.0, 1e-8, 1e-3, 1.0]),
    weight_decay=st.sampled_from([0.0, 1e-4, 0.1, 2.0]),
    decoupled=st.booleans(),
)
seeds = st.integers(0, 2**31)


class Tensors:
    """Weights, gradients, momentum, variance and compute weights of one span."""

    def __init__(self, size: int, seed: int, *, special: bool = False, fill: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        values = rng.standard_normal((4, size)).astype(np.float32) * np.float32(fill)
        values[3] = np.abs(values[3])
        if special:
            mask = rng.random((4, size)) < 0.4
            values[mask] = rng.choice(np.array(SPECIAL, dtype=np.float32), mask.sum())
        self.w, self.g, self.m, self.v = torch.from_numpy(values).unbind()
        self.c = torch.full((size,), -7.0, dtype=torch.bfloat16)

    def clone(self) -> "Tensors":
        other = Tensors(0, 0)
        for name in "wgmvc":
            setattr(other, name, getattr(self, name).clone())
        return other

    def span(self, row: int = 0, *, compute: bool = True) -> list[int]:
        addresses = [getattr(self, name).data_ptr() for name in "wgmvc"]
        return [*addresses[:4], addresses[4] if compute else 0, self.w.numel(), row]

    def assert_same(self, other: "Tensors") -> None:
        for name in "wgmvc":
            assert same_bits(getattr(self, name), getattr(other, name)), name


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Every bit equal, so -0.0 is not 0.0; one NaN is as good as another."""
    integer = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return bool(((a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())).all())


def run(tensors: Tensors, scalars: AdamScalars, isa: str, *, num_threads: int = 1, compute: bool = True) -> None:
    _adam.update(array("Q", tensors.span(compute=compute)), array("f", scalars), num_threads, isa)


def define(tensors: Tensors, scalars: AdamScalars) -> Tensors:
    expected = tensors.clone()
    adam_update(expected.w, expected.g, expected.m, expected.v, scalars, expected.c)
    return expected


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.9), (0.0, 0.0)])
def test_equals_the_definition_at_every_size(special, decoupled, betas):
    scalars = AdamScalars.at_step(3.0, lr=1e-2, betas=betas, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
    for size in SIZES + (CHUNK_SIZES if decoupled and special else []):
        start = Tensors(size, size, special=special)
        expected = define(start, scalars)
        for isa in ISAS:
            tensors = start.clone()
            run(tensors, scalars, isa, num_threads=2)
            tensors.assert_same(expected)


@settings(deadline=None, max_examples=100)
@given(
    size=st.integers(0, 300),
    seed=seeds,
    scalars=step_scalars,
    special=st.booleans(),
    fill=st.sampled_from([1, 1e-6, 1e-19, 1e15]),
)
def test_equals_the_definition_for_any_hyper_parameters(size, seed, scalars, special, fill):
    start = Tensors(size, seed, special=special, fill=fill)
    expected = define(start, scalars)
    for isa in ISAS:
        tensors = start.clone()
        run(tensors, scalars, isa)
        tensors.assert_same(expected)


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 70_000) | st.integers(0, 70), min_size=1, max_size=12),
    seed=seeds,
    num_threads=st.integers(2, 9),
    rows=st.lists(step_scalars, min_size=1, max_size=3),
)
def test_many_spans_in_one_call_equal_one_call_each(sizes, seed, num_threads, rows):
    isa = ISAS[-1]
    spans = [Tensors(size, seed + index) for index, size in enumerate(sizes)]
    expected = [tensors.clone() for tensors in spans]
    for index, tensors in enumerate(expected):
        run(tensors, rows[index % len(rows)], isa, compute=index % 2 == 0)
    table = array("Q")
    for index, tensors in enumerate(spans):
        table.extend(tensors.span(index % len(rows), compute=index % 2 == 0))
    _adam.update(table, array("f", [value for row in rows for value in row]), num_threads, isa)
    for tensors, other in zip(spans, expected, strict=True):
        tensors.assert_same(other)


def test_nothing_outside_a_span_is_written():
    scalars = AdamScalars.at_step(1.0, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, decoupled=True)
    for isa in ISAS:
        for size in (0, 1, 15, 16, 17, 33):
            tensors = Tensors(100, 1)
            before = tensors.clone()
            span = [address + 40 * (2 if index == 4 else 4) for index, address in enumerate(tensors.span()[:5])]
            _adam.update(array("Q", [*span, size, 0]), array("f", scalars), 2, isa)
            for name in "wgmvc":
                now, then = getattr(tensors, name), getattr(before, name)
                assert torch.equal(now[:40], then[:40])
                assert torch.equal(now[40 + size :], then[40 + size :])
                assert size == 0 or name == "g" or not torch.equal(now, then)


def torch_update(tensors: Tensors, step: int, **options) -> None:
    """One step of torch's own optimizer on our tensors."""
    parameter = torch.nn.Parameter(tensors.w)
    parameter.grad = tensors.g
    decoupled = options.pop("decoupled")
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([parameter], foreach=False, **options)
    state = {"step": torch.tensor(float(step - 1)), "exp_avg": tensors.m, "exp_avg_sq": tensors.v}
    optimizer.state[parameter] = state
    optimizer.step()


needs_fma_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch fuses multiply and add only in its AVX2 and AVX-512 kernels",
)

torch_options = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-6, 1.0),
        "betas": st.tuples(st.floats(0, 0.9999), st.floats(0, 0.99999)),
        "eps": st.sampled_from([1e-8, 1e-6]),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
        "decoupled": st.booleans(),
    }
)


@needs_fma_torch
@settings(deadline=None, max_examples=100)
@given(size=st.integers(1, 300), seed=seeds, step=st.integers(1, 10**5), options=torch_options)
def test_is_torch_bit_for_bit_once_torch_rounds_sqrt_correctly(size, seed, step, options):
    ours = Tensors(size, seed)
    theirs = ours.clone()
    run(ours, AdamScalars.at_step(float(step), **options), ISAS[-1], compute=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", lambda x: x.double().pow(0.5).float())
        torch_update(theirs, step, **options)
    ours.assert_same(theirs)


@needs_fma_torch
@settings(deadline=None, max_examples=60)
@given(seed=seeds, step=st.integers(1, 10**5), options=torch_options)
def test_is_within_2_ulp_of_torch(seed, step, options):
    """2 ulp of the weight; where the update is so large that it may cancel the weight, 4 ulp of the larger of the two.

    Torch's ``sqrt`` is off by up to one ulp, which its later roundings make four of the update; see the test above.
    """
    ours = Tensors(3001, seed)
    theirs, before = ours.clone(), ours.w.clone()
    run(ours, AdamScalars.at_step(float(step), **options), ISAS[-1], compute=False)
    torch_update(theirs, step, **options)
    assert same_bits(ours.m, theirs.m)
    assert same_bits(ours.v, theirs.v)
    update = (theirs.w - before).abs()
    difference = (ours.w.double() - theirs.w.double()).abs()
    small = update <= theirs.w.abs() / 4
    assert (difference <= 2 * ulp(theirs.w))[small].all()
    assert (difference <= 4 * torch.maximum(ulp(update), ulp(before)))[~small].all()


def ulp(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.spacing(values.abs().numpy()).astype(np.float64))


def test_compute_weights_are_rounded_to_nearest_even_and_nan_stays_nan():
    """Every upper half with the interesting lower halves; lr 0 leaves the weights as they are."""
    upper = np.arange(0, 2**16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    weights = torch.from_numpy((upper[:, None] | lower).ravel().view(np.float32))
    scalars = AdamScalars.at_step(1.0, lr=0.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, decoupled=True)
    for isa in ISAS:
        tensors = Tensors(weights.numel(), 1)
        tensors.w = weights.clone()
        run(tensors, scalars, isa)
        exact = tensors.w.to(torch.bfloat16)
        nan = weights.isnan()
        assert torch.equal(tensors.c.isnan(), nan)
        assert torch.equal(tensors.c[~nan].view(torch.int16), exact[~nan].view(torch.int16))
        assert torch.equal(tensors.w[~nan], weights[~nan])


def is_nearest(result: float, exact: Fraction) -> bool:
    """Whether no float32 is nearer to `exact` than `result`; infinity stands for all beyond the largest."""
    if not np.isfinite(result):
        return abs(exact) > Fraction(float(np.finfo(np.float32).max))
    with np.errstate(all="ignore"):
        neighbours = np.nextafter(np.float32(result), np.array([-np.inf, np.inf], dtype=np.float32))
    error = abs(Fraction(result) - exact)
    return all(error <= abs(Fraction(float(other)) - exact) for other in neighbours if np.isfinite(other))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(*[st.floats(width=32)] * 3), min_size=1, max_size=50))
def test_fused_multiply_add_rounds_once(rows):
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
    options = {"lr": 0.0, "betas": (0.0, 0.9), "eps": 1.0, "weight_decay": factor, "decoupled": False}
    for isa in ISAS:
        tensors = Tensors(40, 0)
        tensors.w.fill_(sign * factor)
        tensors.g.fill_(sign * addend)
        run(tensors, AdamScalars.at_step(1.0, **options), isa)
        assert (tensors.m == expected).all()


def test_flushing_denormals_is_the_callers_choice_on_every_thread():
    scalars = AdamScalars.at_step(5.0, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, decoupled=True)
    size = 400_000
    results = []
    for flush in (False, True):
        tensors = Tensors(size, 3)
        tensors.v.fill_(0)
        tensors.g.fill_(1e-20)  # its square is denormal
        assert torch.set_flush_denormal(flush)
        try:
            run(tensors, scalars, ISAS[-1], num_threads=4)
        finally:
            torch.set_flush_denormal(False)
        results.append(tensors.v)
    assert (results[0] > 0).all()
    assert (results[1].view(torch.int32) == 0).all()


@pytest.mark.parametrize(
    ("spans", "scalars", "num_threads", "isa", "message"),
    [
        ([1, 2, 3], [0.0] * 8, 1, "baseline", "7 numbers per span"),
        ([1] * 7, [0.0] * 7, 1, "baseline", "8 per row"),
        ([64, 64, 64, 64, 0, 1, 1], [0.0] * 8, 1, "baseline", "row 1 of 1"),
        ([64, 0, 64, 64, 0, 1, 0], [0.0] * 8, 1, "baseline", "null address"),
        ([], [], 0, "baseline", "num_threads must be at least 1, got 0"),
        ([], [], 1, "sse9", "isa 'sse9' cannot be used: this CPU supports baseline"),
    ],
)
def test_bad_tables_are_refused(spans, scalars, num_threads, isa, message):
    with pytest.raises(ValueError, match=message):
        _adam.update(array("Q", spans), array("f", scalars), num_threads, isa)


def test_advance_counts_steps():
    steps = torch.tensor([0.0, 41.0])
    values = array("f", [0.0, 0.0])
    _adam.advance(array("Q", [steps.data_ptr(), steps.data_ptr() + 4]), values)
    assert steps.tolist() == list(values) == [1.0, 42.0]
    with pytest.raises(ValueError, match="1 addresses and room for 2"):
        _adam.advance(array("Q", [steps.data_ptr()]), values)
    with pytest.raises(ValueError, match="null address"):
        _adam.advance(array("Q", [steps.data_ptr(), 0]), values)
    assert steps.tolist() == [1.0, 42.0]


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize("module", [_adam, _cpu], ids=lambda module: module.__name__)
def test_no_wide_instruction_outside_the_functions_for_that_isa(module):
    """An AVX instruction in common code would stop older CPUs with SIGILL."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", module.__file__], capture_output=True, text=True, check=True
    ).stdout
    function, offenders, kernels = "", set(), set()
    for line in listing.splitlines():
        if header := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            function = header[1]
        elif re.search(r"\t\s*v[a-z0-9]+\s|%[yz]mm|%k[0-7]", line):
            (kernels if re.search(r"adam_(span|loop)_avx(2|512)", function) else offenders).add(function)
    if module is _adam and not kernels:
        pytest.skip("the extension was stripped of its symbols")
    assert not offenders


@pytest.mark.slow
def test_more_elements_than_32_bits_can_count():
    """The last element is beyond 2 ** 31: offsets are 64-bit."""
    import psutil

    size = 2**31 + 17
    if psutil.virtual_memory().available < size * 17:
        pytest.skip(f"needs {size * 16 / 2**30:.0f} GiB of memory")
    w, g, m, v = (torch.zeros(size) for _ in range(4))
    w[-1], g[-1] = 1.0, 1.0
    scalars = AdamScalars.at_step(1.0, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, decoupled=True)
    table = array("Q", [w.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), 0, size, 0])
    _adam.update(table, array("f", scalars), _cpu.available_threads(), ISAS[-1])
    assert w[-1].item() == pytest.approx(0.9)
    assert w[-2].item() == 0.0
