"""`GradientMeter`: sums of squares that are taken once, noticed when they are out of date, and right for any tensor."""

import copy
import math
import types

import pytest
import torch

from lightning_cxl.gradients.guard import Addition, GradientHooks, GradientMeter
from lightning_cxl.optim import cpu_adam as clipping

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(tensor):
    return float(tensor.detach().double().square().sum())


@pytest.fixture
def sweeps(monkeypatch):
    """The number of tensors in each sweep of the kernel that only measures."""
    calls = []
    measure = clipping._grads.measure

    def counting(spans, results, *rest):
        calls.append(len(results))
        return measure(spans, results, *rest)

    monkeypatch.setattr(clipping, "_grads", types.SimpleNamespace(measure=counting))
    return calls


def random(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_and_accumulate_measure_what_they_write(sweeps, dtype):
    meter = GradientMeter()
    source, home = random((37, 5), dtype), torch.empty(37, 5)
    meter.copy_all([(source, home)])
    assert torch.equal(home, source.float())
    assert meter.sums([home]) == pytest.approx([exact(home)], rel=1e-12)
    other = random((37, 5), dtype, seed=1)
    meter.accumulate_all([Addition(other, home, 0)])
    assert torch.equal(home, source.float() + other.float())
    assert meter.sums([home]) == pytest.approx([exact(home)], rel=1e-12)
    assert not sweeps, "both were measured as they were written"


CHANGES = {
    "in place": lambda g: g.mul_(2),
    "foreach": lambda g: torch._foreach_mul_([g], 2.0),
    "clip by value": lambda g: torch.nn.utils.clip_grad_value_([_holder(g)], 0.01),
    "clip by norm": lambda g: torch.nn.utils.clip_grad_norm_([_holder(g)], 0.01),
    "element": lambda g: g.__setitem__(0, 7.0),
    "view": lambda g: g.view(-1)[:3].zero_(),
}


def _holder(grad):
    parameter = torch.nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change, sweeps):
    meter = GradientMeter()
    grad = random((40,))
    before = meter.sums([grad])
    assert meter.sums([grad]) == before and sweeps == [1]
    CHANGES[change](grad)
    assert meter.sums([grad]) == pytest.approx([exact(grad)], rel=1e-12)
    assert meter.sums([grad]) != before and sweeps == [1, 1]


def test_changes_through_data_are_seen_where_versions_are_not_trusted():
    meter = GradientMeter()
    grad = torch.ones(4)
    assert meter.sums([grad]) == [4.0]
    grad.data[0] = math.nan
    assert meter.sums([grad]) == [4.0], "as documented"
    meter.trusts_versions = False
    assert math.isnan(meter.sums([grad])[0])


def test_a_copy_of_a_gradient_has_a_number_of_its_own():
    meter, grad = GradientMeter(), torch.empty(4).fill_(1.0)
    assert meter.sums([grad]) == [4.0]
    other = copy.deepcopy(grad)
    other.data.mul_(2)
    assert other._version == grad._version and meter.sums([other]) == [16.0]


def test_where_hooks_of_the_user_run_nothing_is_taken_for_unchanged():
    meter, parameter = GradientMeter(), torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    hooks = GradientHooks(parameter, lambda: None, stays=False)
    assert meter.sums_of([parameter]) == [4.0]
    parameter.grad.data.mul_(2)
    assert meter.sums_of([parameter]) == [4.0], "as documented"
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert meter.sums_of([parameter]) == [16.0]
    hooks.remove()


ODD = {
    "strided": random((8, 8))[:, ::2],
    "expanded": torch.full((1,), 2.0).expand(5),
    "negated": torch._neg_view(random((9,))),
    "float64": random((9,)).double() * 1e30,
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0),
    "transposed": random((3, 4)).T,
    "sparse": torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]), torch.tensor([1.0, 2.0, 4.0]), (5,), check_invariants=True
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_tensors(name):
    grad = ODD[name]
    dense = grad.to_dense() if grad.is_sparse else grad
    assert GradientMeter().sums([grad]) == pytest.approx([exact(dense)], rel=1e-6)


def test_changed_values_of_a_sparse_gradient_are_noticed():
    indices, values = torch.tensor([[1, 3]]), torch.tensor([3.0, 4.0])
    grad = torch.sparse_coo_tensor(indices, values, (5,), check_invariants=True).coalesce()
    meter = GradientMeter()
    assert meter.sums([grad]) == [25.0]
    grad.values().mul_(2)
    assert meter.sums([grad]) == [100.0]


@pytest.mark.parametrize("name", ["strided", "float64", "scalar", "transposed"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(name, bad):
    grad = ODD[name].clone()
    grad[(-1,) * grad.dim()] = bad
    assert not math.isfinite(GradientMeter().sums([grad])[0])


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, 3e38), (torch.bfloat16, 3e38), (torch.float64, 1e300)])
def test_large_finite_gradients_are_finite(dtype, value):
    (total,) = GradientMeter().sums([torch.full((1000,), value, dtype=dtype)])
    assert math.isfinite(total) and total > 1e70


@pytest.mark.parametrize("layout", ["strided", "other order", "float64"])
def test_tensors_that_kernels_do_not_move(layout):
    source = {"strided": random((6, 8))[:, ::2], "other order": random((4, 6)).T, "float64": random((6, 4)).double()}[
        layout
    ]
    home = torch.empty(6, 4)
    meter = GradientMeter()
    meter.copy_all([(source, home)])
    assert torch.equal(home, source.float())
    meter.accumulate_all([Addition(source, home, 0)])
    assert torch.equal(home, source.float() * 2)
    assert meter.sums([home]) == pytest.approx([exact(home)], rel=1e-12)
