"""Sums of squares of gradients, steps with those that are not finite, and clipping that is folded into the step."""

import copy
import math
import types
import warnings
from functools import partial

import pytest
import torch

from lightning_cxl.errors import GradientOverflowError, LightningCXLWarning
from lightning_cxl.gradients.guard import Addition, GradientHooks, GradientMeter, HostUnscale, OverflowGuard
from lightning_cxl.optim import cpu_adam as clipping
from lightning_cxl.optim.cpu_adam import CPUAdam, clip_factor
from tests.unit.optim.adam_pairs import assert_close, parameters, set_gradients

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
    "element": lambda g: g.__setitem__(0, 7.0),
    "view": lambda g: g.view(-1)[:3].zero_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change, sweeps):
    meter = GradientMeter()
    grad = random((40,))
    before = meter.sums([grad])
    assert meter.sums([grad]) == before and sweeps == [1]
    CHANGES[change](grad)
    assert meter.sums([grad]) == pytest.approx([exact(grad)], rel=1e-12)
    assert meter.sums([grad]) != before and sweeps == [1, 1]


def test_changes_through_data_are_seen_of_a_copy_and_where_versions_are_not_trusted():
    meter = GradientMeter()
    grad = torch.empty(4).fill_(1.0)
    assert meter.sums([grad]) == [4.0]
    other = copy.deepcopy(grad)
    other.data.mul_(2)
    assert other._version == grad._version and meter.sums([other]) == [16.0]
    grad.data[0] = math.nan
    assert meter.sums([grad]) == [4.0], "as documented"
    meter.trusts_versions = False
    assert math.isnan(meter.sums([grad])[0])


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
    "large": torch.full((1000,), 3e38),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0),
    "transposed": random((3, 4)).T,
    "sparse": torch.sparse_coo_tensor([[1, 1, 3]], [1.0, 2.0, 4.0], (5,), check_invariants=True),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_tensors(name):
    grad = ODD[name]
    dense = grad.to_dense() if grad.is_sparse else grad
    assert GradientMeter().sums([grad]) == pytest.approx([exact(dense)], rel=1e-6)
    (total,) = GradientMeter().sums([torch.full((1000,), 1e300, dtype=torch.float64)])
    assert math.isfinite(total) and total > 1e70
    for bad in (math.inf, -math.inf, math.nan) if name in ("strided", "float64", "scalar", "transposed") else ():
        spoiled = grad.clone()
        spoiled[(-1,) * grad.dim()] = bad
        assert not math.isfinite(GradientMeter().sums([spoiled])[0])


def test_changed_values_of_a_sparse_gradient_are_noticed():
    indices, values = torch.tensor([[1, 3]]), torch.tensor([3.0, 4.0])
    grad = torch.sparse_coo_tensor(indices, values, (5,), check_invariants=True).coalesce()
    meter = GradientMeter()
    assert meter.sums([grad]) == [25.0]
    grad.values().mul_(2)
    assert meter.sums([grad]) == [100.0]


@pytest.mark.parametrize("source", [random((6, 8))[:, ::2], random((4, 6)).T, random((6, 4)).double()])
def test_tensors_that_kernels_do_not_move(source):
    home = torch.empty(6, 4)
    meter = GradientMeter()
    meter.copy_all([(source, home)])
    assert torch.equal(home, source.float())
    meter.accumulate_all([Addition(source, home, 0)])
    assert torch.equal(home, source.float() * 2)
    assert meter.sums([home]) == pytest.approx([exact(home)], rel=1e-12)


NAMES = ["embed", "body", "head"]
OWNER = torch.optim.SGD([torch.zeros(1)])


def guarded(action="skip", limit=3, shapes=((4,), (5, 3), ())):
    params = parameters(*shapes)
    set_gradients(params, 0)
    names = {id(p): name for p, name in zip(params, NAMES, strict=False)}
    return params, OverflowGuard(action, limit, lambda p: names[id(p)], GradientMeter())


def spoil(parameter, value=math.inf):
    parameter.grad.view(-1)[-1] = value


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("bad", [[0], [1], [2], [1, 2]], ids=str)
def test_the_warning_names_the_first_bad_parameter(bad, value):
    params, guard = guarded()
    for index in bad:
        spoil(params[index], value)
    assert guard.first_bad(params) is params[bad[0]]
    with pytest.warns(LightningCXLWarning, match=f"gradient of `{NAMES[bad[0]]}` has elements.*step is left out"):
        assert not guard.accepts(OWNER, params)


def test_one_warning_for_each_streak_and_an_end_to_it(caplog):
    params, guard = guarded(limit=3)

    def step(bad):
        set_gradients(params, 0)
        if bad:
            spoil(params[1])
        return guard.accepts(OWNER, params)

    for _ in range(2):
        with pytest.warns(LightningCXLWarning, match="`body`"):
            assert not step(True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not step(True)
        assert step(False)
    assert guard.num_skipped == 4
    with pytest.warns(LightningCXLWarning), pytest.raises(GradientOverflowError, match=r"`body`.*in 3 steps in a row"):
        for _ in range(4):
            step(True)
    assert guard.num_skipped == 7


def test_what_was_bad_before_clipping_in_place_is_named():
    params, guard = guarded()
    owner = torch.optim.SGD(params)
    spoil(params[1], math.nan)
    guard.note_bad(owner)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    assert not params[0].grad.isfinite().any()
    with pytest.warns(LightningCXLWarning, match="`body`"):
        assert not guard.accepts(owner, params)
    assert not guard.accepts(owner, params), "remembered for one step"
    set_gradients(params, 0)
    guard.note_bad(owner)
    assert guard.accepts(owner, params)
    spoil(params[2])
    with pytest.warns(LightningCXLWarning, match="`head`"):
        assert not guard.accepts(owner, params)


def scaled(make_optimizer, action="skip", *, defer, limit=3):
    """A scaler at 4 whose unscaling is ours, and gradients that are 4 times too large."""
    params, guard = guarded(action, limit)
    optimizer = make_optimizer(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    scaler._unscale_grads_ = HostUnscale(scaler, lambda o: o, lambda o: defer, guard)
    scaler.scale(torch.ones(()))
    return params, optimizer, scaler, guard


adam, sgd = partial(CPUAdam, lr=0.1), partial(torch.optim.SGD, lr=0.1)
torch_adam = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.0)


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize(("make", "like"), [(adam, torch_adam), (sgd, sgd)], ids=["CPUAdam", "SGD"])
@pytest.mark.parametrize("clip", [False, True])
def test_scaler_steps_like_torchs(make, like, defer, clip):
    params, optimizer, scaler, guard = scaled(make, defer=defer)
    theirs = parameters((4,), (5, 3), ())
    reference = like(theirs)
    for step in range(5):
        set_gradients(params, step)
        set_gradients(theirs, step)
        for p in params:
            p.grad.mul_(scaler.get_scale())
        if step in (1, 3):
            spoil(params[1])
            with pytest.warns(LightningCXLWarning, match="`body`"):
                scaler.unscale_(optimizer)
        else:
            scaler.unscale_(optimizer)
        if clip and isinstance(optimizer, CPUAdam):
            optimizer.clip_grad_norm_(0.5, scale=scaler._unscale_grads_.factor)
        elif clip:
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        before = [p.detach().clone() for p in params]
        scaler.step(optimizer)
        scaler.update()
        if step in (1, 3):
            assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True)), "the step is left out"
        else:
            if clip:
                torch.nn.utils.clip_grad_norm_(theirs, 0.5)
            reference.step()
            assert guard.accepts(optimizer, params), "the step asks, too: a streak is over"
        optimizer.zero_grad()
        assert getattr(optimizer, "grad_scale", 1.0) == 1.0
    assert scaler.get_scale() == 1.0
    assert_close(params, theirs)


def test_deferred_unscaling_leaves_gradients_and_sets_the_factor():
    params, optimizer, scaler, _ = scaled(adam, defer=True)
    before = params[0].grad.clone()
    for _ in range(2):
        scaler.unscale_(optimizer)
        assert torch.equal(params[0].grad, before) and optimizer.grad_scale == 0.25
        optimizer.clip_grad_norm_(1e-3)
        scaler.update()  # the user leaves the step out: its factor does not stay
    eager, plain, scaler, _ = scaled(sgd, defer=True)
    before = eager[0].grad.clone()
    scaler.unscale_(plain)
    assert torch.equal(eager[0].grad, before / 4), "other optimizers read what is in `.grad`"


def test_unscaled_gradients_are_measured_again():
    """torch's kernel unscales without a new version."""
    params, optimizer, scaler, guard = scaled(sgd, defer=False)
    before = guard._meter.sums([p.grad for p in params])
    scaler.unscale_(optimizer)
    assert guard._meter.sums([p.grad for p in params]) == pytest.approx([value / 16 for value in before])


@pytest.mark.parametrize("action", ["skip", "error", "ignore"])
def test_overflows_under_a_scaler_count(action):
    params, optimizer, scaler, guard = scaled(adam, action, defer=True, limit=2)
    spoil(params[1])

    def overflow():
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    start = [p.detach().clone() for p in params]
    if action == "ignore":
        for _ in range(5):
            overflow()
        assert guard.num_skipped == 5 and scaler.get_scale() == 4 / 32
        assert all(torch.equal(p, s) for p, s in zip(params, start, strict=True)), "the scaler leaves them out"
    else:  # "error" too: that a scaler looks for its scale is none
        with pytest.warns(LightningCXLWarning):
            overflow()
        with pytest.raises(GradientOverflowError, match="2 steps in a row"):
            overflow()


@pytest.fixture
def two():
    made = [parameters((40,)) for _ in range(2)]
    for params in made:
        set_gradients(params, 0)
    return *made, *map(CPUAdam, made)


def test_the_norm_is_torchs_and_the_factor_is_for_one_step(two):
    _, theirs, adam, _ = two
    assert adam.clip_grad_norm_(0.1) == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs, 0.1)), rel=1e-6)
    adam.step()
    assert adam.grad_scale == 1.0


@pytest.mark.parametrize("left_over", [1e-3, 0.0, math.inf, math.nan])
def test_a_factor_of_a_step_that_was_left_out_does_not_count(left_over, two):
    _, _, one, other = two
    other.grad_scale = left_over
    assert other.clip_grad_norm_(0.1) == one.clip_grad_norm_(0.1)
    assert other.grad_scale == one.grad_scale


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_factor_does_not_reach_gradients_it_was_not_for(bad, two):
    once, twice, one, other = two
    twice[0].grad = torch.full((40,), math.nan)
    other.clip_grad_norm_(1.0)
    other.grad_scale = bad
    for params in (once, twice):  # as `model.zero_grad()` and another backward
        set_gradients(params, 0)
    one.step()
    other.step()
    assert_close(twice, once)


def test_factor():
    assert clip_factor([9.0, 16.0], 10.0, 1.0) == (5.0, 1.0)
    assert clip_factor([9.0, 16.0], 1.0, 1.0) == (5.0, 1.0 / (5.0 + 1e-6))
    assert clip_factor([9.0, 16.0], 1.0, 0.1)[1] == 1.0, "scaled, the norm is 0.5"
    assert clip_factor([math.inf, 1.0], 1.0, 1.0) == (math.inf, 0.0)
    assert math.isnan(clip_factor([math.nan, 1.0], 1.0, 1.0)[1])


class Wrapper:
    """As a framework's: passes attributes on, keeps what is set on it."""

    def __init__(self, optimizer):
        self.__dict__["optimizer"] = optimizer
        self.__class__ = type("Wrapped", (Wrapper, type(optimizer)), {})

    def __getattr__(self, name):
        return getattr(self.optimizer, name)


def test_clipping_through_a_wrapper_reaches_the_optimizer_and_zero_grad_takes_the_factor_away(two):
    params, _, adam, _ = two
    wrapper = Wrapper(adam)
    wrapper.clip_grad_norm_(1e-3)
    assert adam.grad_scale == wrapper.grad_scale < 1e-3
    wrapper.zero_grad()
    assert adam.grad_scale == 1.0 and params[0].grad is None
