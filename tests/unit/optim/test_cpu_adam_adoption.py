"""`CPUAdam.from_torch` and learning-rate schedulers: nothing the user holds stops working."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.gradients.step import _Sensitive
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.masters import MasterWeights
from tests.unit.optim.adam_pairs import assert_close, assert_same_state, parameters, set_gradients


@pytest.mark.parametrize(
    "make_scheduler",
    [
        partial(schedulers.LambdaLR, lr_lambda=lambda epoch: 0.9**epoch),
        partial(schedulers.StepLR, step_size=2, gamma=0.1),
        partial(schedulers.CosineAnnealingLR, T_max=5),
        partial(schedulers.CosineAnnealingWarmRestarts, T_0=2),
        partial(schedulers.LinearLR, total_iters=4),
        partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=8),
        partial(schedulers.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2),
        partial(schedulers.ReduceLROnPlateau, patience=0),
    ],
    ids=lambda make: make.func.__name__,
)
@pytest.mark.parametrize("repoint", [False, True])
def test_schedulers(make_scheduler, repoint):
    """On CPUAdam, or made for the user's optimizer and pointed at CPUAdam afterwards; no warnings (they are errors)."""
    theirs, ours = parameters((6,)), parameters((6,))
    torch_adam, original = torch.optim.AdamW(theirs, lr=0.1), torch.optim.AdamW(ours, lr=0.1)
    expected = make_scheduler(torch_adam)
    if repoint:
        scheduler = make_scheduler(original)
        adam = CPUAdam.from_torch(original)
        scheduler.optimizer = adam
    else:
        adam = CPUAdam.from_torch(original)
        scheduler = make_scheduler(adam)
    arguments = (1.0,) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else ()
    for step in range(6):
        for params, optimizer, current in ((theirs, torch_adam, expected), (ours, adam, scheduler)):
            set_gradients(params, step)
            optimizer.step()
            current.step(*arguments)
        assert adam.param_groups[0]["lr"] == torch_adam.param_groups[0]["lr"]
    assert_close(ours, theirs)


def test_from_torch_shares_groups_defaults_and_hooks_and_keeps_the_state():
    theirs, ours = parameters((3,)), parameters((3,))
    torch_adam, original = torch.optim.Adam(theirs), torch.optim.Adam(ours)
    calls = []
    original.register_step_post_hook(lambda optimizer, args, kwargs: calls.append(optimizer))
    for params, optimizer in ((theirs, torch_adam), (ours, original)):
        set_gradients(params, 0)
        optimizer.step()
    adam = CPUAdam.from_torch(original)
    assert adam.param_groups is original.param_groups
    assert adam.defaults is original.defaults
    for params, optimizer in ((theirs, torch_adam), (ours, adam)):
        set_gradients(params, 1)
        optimizer.step()
    assert calls == [original, adam]
    assert_same_state(adam.state_dict()["state"], torch_adam.state_dict()["state"])
    assert_close(ours, theirs)


def test_other_optimizers_are_refused():
    class Custom(torch.optim.AdamW):
        pass

    for make in (partial(torch.optim.SGD, lr=0.1), Custom):
        with pytest.raises(UnsupportedError, match=r"can replace torch.optim.Adam and AdamW, not .*cpu_adam=False"):
            CPUAdam.from_torch(make(parameters((3,))))


def test_a_copy_of_an_adopted_optimizer_knows_whose_state_stays_float32():
    """As keys of its own parameters: what decides in the original belongs to the model that is adopted."""
    embedding, other = (torch.nn.Parameter(torch.randn(96, 64).half()) for _ in range(2))
    masters = MasterWeights({}, lambda compute, role, dtype: torch.empty(compute.shape, dtype=dtype))
    pairs = [masters.adopt(parameter, "fp32") for parameter in (embedding, other)]
    params = [pair.master.requires_grad_(False) for pair in pairs]
    adam = CPUAdam(params, state="8bit", fp32_state=_Sensitive(masters, {embedding: None}.__contains__))
    for twin in (copy.deepcopy(adam), pickle.loads(pickle.dumps(adam)), adam):
        for parameter in twin.param_groups[0]["params"]:
            parameter.grad = torch.ones(96, 64)
        twin.step()
        kept = ["exp_avg" in twin.state[parameter] for parameter in twin.param_groups[0]["params"]]
        assert kept == [True, False]


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2**20 + 7), (2**20 + 7, 3)], ids=str)
def test_reading_data_costs_no_memory_and_writes_through_it_count(shape, is_transposed):
    weights = torch.randn(shape).bfloat16()
    compute = torch.nn.Parameter(weights.mT.contiguous().mT if is_transposed and weights.ndim == 2 else weights)
    masters = MasterWeights({}, lambda compute, role, dtype: torch.empty(compute.shape, dtype=dtype))
    pair = masters.adopt(compute, "fp32")
    pair.master.data.mul_(1 + 2**-12)  # less than the compute weights can tell
    expected = pair.master.detach().clone()
    pair.put_front(lambda: None)
    with torch.profiler.profile(profile_memory=True) as profile:
        assert compute.data is not None
        masters.absorb_changes()
    assert torch.equal(pair.master, expected)
    if compute.is_contiguous():
        assert max(event.self_cpu_memory_usage for event in profile.events()) <= 4 * 2**20
    if compute.numel():
        last = tuple(size - 1 for size in shape)
        compute.data[last] = expected[last] = 5.0
        masters.absorb_changes()
        assert torch.equal(pair.master, expected)
    pair.remove_front()
