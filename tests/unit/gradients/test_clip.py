"""Clipping by norm that is folded into the step of `CPUAdam`: the same norms and updates as torch's clipping."""

import math
import types

import pytest
import torch

from lightning_cxl.gradients.guard import GradientMeter, HostClip, OverflowGuard
from lightning_cxl.optim.cpu_adam import CPUAdam, clip_factor
from tests.unit.optim.adam_pairs import assert_close, pair, parameters, set_gradients

SHAPES = ((300, 7), (5,), (), (0,), (4096,))


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 10.0, 1e6])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_follows_torch(make, max_norm):
    theirs, torch_adam, ours, adam = pair(make, SHAPES, lr=0.05, weight_decay=0.1)
    for step in range(5):
        set_gradients(theirs, step)
        set_gradients(ours, step)
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        before = [p.grad.clone() for p in ours]
        norm = adam.clip_grad_norm_(max_norm)
        assert norm == pytest.approx(float(expected), rel=1e-6)
        assert all(torch.equal(p.grad, b) for p, b in zip(ours, before, strict=True)), "no sweep over the gradients"
        torch_adam.step()
        adam.step()
        assert adam.grad_scale == 1.0
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                adam.state[mine]["exp_avg"], torch_adam.state[other]["exp_avg"], rtol=1e-5, atol=1e-8
            )
    assert_close(ours, theirs, 1e-5)


@pytest.fixture
def two():
    """Two optimizers with the same parameters, and their gradients."""
    made = [parameters((40,)) for _ in range(2)]
    for params in made:
        set_gradients(params, 0)
    return *made, *map(CPUAdam, made)


def test_scale_is_a_factor_of_the_gradients_before_clipping(two):
    whole, scaled, one, other = two
    scaled[0].grad.mul_(1024)
    assert other.clip_grad_norm_(0.5, scale=1 / 1024) == pytest.approx(one.clip_grad_norm_(0.5))
    one.step()
    other.step()
    assert_close(scaled, whole)


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


def test_gradients_edited_through_data_are_measured_as_they_are(two):
    params, _, adam, _ = two
    norm = adam.clip_grad_norm_(1.0)
    params[0].grad.data.mul_(0.5)
    assert adam.clip_grad_norm_(1.0) == pytest.approx(norm / 2)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_that_are_not_finite_end_as_with_torch(bad):
    theirs, torch_adam, ours, adam = pair(torch.optim.AdamW, ((4,), (3,)))
    for params, optimizer in ((theirs, torch_adam), (ours, adam)):
        set_gradients(params, 0)
        params[0].grad[1] = bad
        if params is theirs:
            norm = float(torch.nn.utils.clip_grad_norm_(params, 1.0))
        else:
            ours_norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    assert math.isnan(ours_norm) if math.isnan(norm) else ours_norm == norm
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), equal_nan=True)
    assert any(p.isnan().any() for p in ours)


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


@pytest.mark.parametrize("defers", [True, False])
def test_host_clip_chooses_by_optimizer(defers, two):
    plain = []
    guard = OverflowGuard("skip", 3, lambda p: "weight", GradientMeter())
    unscale = types.SimpleNamespace(factor=0.25)
    clip = HostClip(
        lambda *args: plain.append(args), lambda o: getattr(o, "optimizer", o), lambda o: defers, guard, unscale
    )
    params, _, adam, _ = two
    sgd = torch.optim.SGD(params)
    wrapper = Wrapper(adam)
    clip(wrapper, 0.5)
    if defers:
        grads = [p.grad * 0.25 for p in params]
        expected = clip_factor([float(g.double().square().sum()) for g in grads], 0.5, 1.0)[1]
        assert not plain and adam.grad_scale == pytest.approx(0.25 * expected)
    else:
        assert plain == [(wrapper, 0.5)] and adam.grad_scale == 1.0
    plain.clear()
    clip(sgd, 0.5)
    assert plain == [(sgd, 0.5)]
