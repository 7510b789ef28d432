"""`OverflowGuard` and `HostUnscale`: which gradients a step may use, and what is said and done about the others."""

import math
import warnings
from functools import partial

import pytest
import torch

from lightning_cxl.errors import GradientOverflowError, LightningCXLWarning
from lightning_cxl.gradients.guard import GradientMeter, HostUnscale, OverflowGuard
from lightning_cxl.optim.cpu_adam import CPUAdam
from tests.unit.optim.adam_pairs import assert_close, parameters, set_gradients

NAMES = ["embed", "body", "head"]
OWNER, OTHER = (torch.optim.SGD([torch.zeros(1)]) for _ in range(2))


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


def test_a_step_that_cannot_be_left_out_is_an_error():
    params, guard = guarded()
    spoil(params[1])
    with pytest.raises(GradientOverflowError, match=r"`body`.*in the middle of a step of SGD.*ignore"):
        guard.accepts(OWNER, params, can_skip=False)


def test_error_raises_at_once_and_names_the_way_out():
    params, guard = guarded("error")
    spoil(params[2])
    with pytest.raises(GradientOverflowError, match=r'`head`.*on_overflow="skip"'):
        guard.accepts(OWNER, params)
    assert isinstance(GradientOverflowError(""), ArithmeticError)


# -- with a loss scaler ------------------------------------------------------------------------------------------------


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
    scaler.unscale_(optimizer)
    assert torch.equal(params[0].grad, before) and optimizer.grad_scale == 0.25
    eager, plain, scaler, _ = scaled(sgd, defer=True)
    before = eager[0].grad.clone()
    scaler.unscale_(plain)
    assert torch.equal(eager[0].grad, before / 4), "other optimizers read what is in `.grad`"


def test_a_factor_from_a_step_that_was_left_out_does_not_stay():
    params, optimizer, scaler, _ = scaled(adam, defer=True)
    scaler.unscale_(optimizer)
    optimizer.clip_grad_norm_(1e-3)
    scaler.update()  # the user left the step out, and `zero_grad`
    scaler.unscale_(optimizer)
    assert optimizer.grad_scale == 0.25
    params[0].grad.fill_(math.inf)
    optimizer.clip_grad_norm_(1.0)
    assert optimizer.grad_scale == 0.0
    optimizer.zero_grad()
    assert optimizer.grad_scale == 1.0


def test_unscaled_gradients_are_measured_again():
    """torch's kernel unscales without a new version."""
    params, optimizer, scaler, guard = scaled(sgd, defer=False)
    before = guard._meter.sums([p.grad for p in params])
    scaler.unscale_(optimizer)
    after = guard._meter.sums([p.grad for p in params])
    assert after == pytest.approx([value / 16 for value in before])


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
