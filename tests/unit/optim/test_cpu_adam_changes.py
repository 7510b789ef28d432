"""What changes after `CPUAdam` was made, parameters, groups, gradients: followed, or refused before any change."""

import copy
import gc
import weakref

import pytest
import torch

from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError
from lightning_cxl.native import _adam
from lightning_cxl.optim.cpu_adam import CPUAdam
from tests.unit.optim.adam_pairs import assert_equal, parameters, set_gradients

LARGE = (64, 128)


def stepped(shapes=((3,), LARGE), **options):
    params = parameters(*shapes)
    adam = CPUAdam([(f"p{index}", p) for index, p in enumerate(params)], lr=0.1, **options)
    set_gradients(params, 0)
    adam.step()
    return params, adam


def snapshot(adam):
    """All that a step changes."""
    params = [p for group in adam.param_groups for p in group["params"]]
    states = [value.clone() for p in params for value in adam.state.get(p, {}).values()]
    return [p.detach().clone() for p in params if p.untyped_storage().nbytes()] + states


def refuses(adam, error, message):
    """A step is refused, and neither weights nor state nor step counts are touched."""
    before = snapshot(adam)
    with pytest.raises(error, match=message):
        adam.step()
    assert_equal(snapshot(adam), before)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_another_dtype_than_the_optimizer_was_made_for_is_refused(dtypes, steps):
    before, after = dtypes
    model = torch.nn.Linear(300, 40).to(before)
    adam = CPUAdam(model.named_parameters())
    for _ in range(steps):
        model(torch.ones(2, 300, dtype=before)).sum().backward()
        adam.step()
    adam.zero_grad()
    saved = copy.deepcopy(adam.state_dict())
    model.to(after)
    model(torch.ones(2, 300, dtype=after)).sum().backward()
    names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
    message = "`weight` was {} when the optimizer was made, is {} now: convert the model first".format(*names)
    refuses(adam, ConfigError, message)
    twin = copy.deepcopy(adam)
    for group in twin.param_groups:
        set_gradients(group["params"], 0)
    refuses(twin, ConfigError, message)
    if steps:
        with pytest.raises(ConfigError, match=message):
            adam.load_state_dict(saved)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda data: torch.zeros(64, 256)[:, :128], UnsupportedError, r"elements of `p1` .* have gaps between them"),
        (lambda data: data.T.contiguous().T, ConfigError, r"`p1` had strides \(128, 1\) .* and has \(1, 64\) now"),
        (lambda data: data[:32], ConfigError, r"`p1` had shape \(64, 128\) when .* and has \(32, 128\) now"),
        (torch._neg_view, ConfigError, "`p1` is a lazily negated view"),  # at the same address
    ],
    ids=["gaps", "order", "shape", "negated"],
)
@pytest.mark.parametrize("with_gradient", [False, True])
def test_another_layout_is_refused(change, error, message, with_gradient):
    params, adam = stepped(((3,), *[LARGE] * 20))
    for p in params[1:]:
        p.data = change(p.data)
        if with_gradient:
            p.grad = None
            p.grad = torch.ones_like(p)
    refuses(adam, error, message)


@pytest.mark.parametrize("what", ["parameter", "part of the parameter", "gradient", "compute weights"])
def test_memory_that_was_taken_away_is_refused(what):
    compute = {}
    params, adam = stepped(compute_weights=compute)
    if what == "compute weights":
        compute[params[1]] = torch.zeros(LARGE, dtype=torch.bfloat16)
        adam.step()
    tensor = {"gradient": params[1].grad, "compute weights": compute.get(params[1])}.get(what, params[1])
    tensor.untyped_storage().resize_(16 if what.startswith("part") else 0)
    message = r"`p1` \(shape \(64, 128\)\) reaches to byte (16384|32768) of its storage, which has (0|16) bytes now"
    before = copy.deepcopy((params[0], adam.state[params[0]]))
    with pytest.raises(ConfigError, match=message):
        adam.step()
    assert_equal((params[0], adam.state[params[0]]), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": -1.0}, "`lr` must be one number, at least 0, got -1.0"),
        ({"lr": "fast"}, "`lr` must be one number, at least 0, got 'fast'"),
        ({"eps": None}, "`eps` must be one number"),
        ({"weight_decay": float("nan")}, "`weight_decay` must be one number"),
        ({"betas": (1.0, 0.999)}, r"`betas` must be two numbers in \[0, 1\), got \(1.0, 0.999\)"),
        ({"betas": (0.9, torch.ones(2))}, "`betas` must be two numbers"),
        ({"betas": 0.9}, "`betas` must be two numbers"),
    ],
    ids=str,
)
def test_hyper_parameters_are_checked_when_made_at_every_step_and_when_loaded(change, message):
    with pytest.raises(ConfigError, match=message):
        CPUAdam(parameters((3,)), **change)
    _, adam = stepped()
    saved = copy.deepcopy(adam.state_dict())
    saved["param_groups"][0].update(change)
    before = snapshot(adam)
    with pytest.raises(CheckpointError, match=f"saved state of parameter group 0: {message}"):
        adam.load_state_dict(saved)
    assert_equal(snapshot(adam), before)
    assert adam.param_groups[0]["lr"] == 0.1
    adam.param_groups[0].update(change)
    refuses(adam, ConfigError, message)


def test_steps_are_counted_when_the_kernel_has_run(monkeypatch):
    _, adam = stepped()

    def fail(*args):
        raise MemoryError("no memory for the index")

    with monkeypatch.context() as patch:
        patch.setattr(_adam, "update", fail)
        refuses(adam, MemoryError, "index")
    adam.step()
    assert [int(state["step"]) for state in adam.state.values()] == [2, 2]


def test_state_that_someone_replaced_by_what_does_not_fit_is_refused():
    params, adam = stepped()
    adam.state[params[1]] = {**adam.state[params[1]], "exp_avg": torch.zeros(3)}
    refuses(adam, CheckpointError, r"exp_avg of `p1` has shape \(3,\)")


def test_a_group_that_was_removed_is_let_go():
    kept, removed = parameters((3,), (4,))
    adam = CPUAdam([{"params": [kept]}, {"params": [removed]}])
    set_gradients([kept, removed], 0)
    adam.step()
    alive = weakref.ref(removed)
    del adam.param_groups[1]
    adam.step()
    assert removed in adam.state, "as with torch's optimizers: the group may come back"
    del adam.state[removed], removed
    adam.step()
    gc.collect()
    assert alive() is None
    assert adam.state[kept]["step"].item() == 3
