"""Fabric: what it has of its own, beside the contract of front ends."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from lightning_cxl import CXLFabricStrategy
from lightning_cxl.errors import UnsupportedError
from tests import training_device
from tests.integration.training import assert_equal, make_fabric, weights_of
from tests.models import TinyTransformer


@pytest.fixture
def strategies():
    made = []

    def make(**options):
        made.append(CXLFabricStrategy(**options))
        return made[-1]

    yield make
    while made:
        made.pop().teardown()


def test_the_strategy_by_name():
    strategy = make_fabric("cxl_offload").strategy
    assert isinstance(strategy, CXLFabricStrategy) and "not set up" in str(strategy)
    assert strategy.distributed_sampler_kwargs is None, "one process keeps its sampler"
    assert "tier_rules" in str(CXLFabricStrategy.__init__.__signature__), "for whoever completes options"


def test_a_file_has_the_master_weights_of_its_own_optimizer_only(strategies):
    fabric = make_fabric(strategies(master="fp32"), "bf16-true")
    model = TinyTransformer()
    parts = list(model.blocks.parameters()), [*model.embed.parameters(), *model.head.parameters()]
    model, *optimizers = fabric.setup(model, *(torch.optim.AdamW(part, lr=1e-2) for part in parts))
    for optimizer, part in zip(optimizers, parts, strict=True):
        masters = optimizer.state_dict()["lightning_cxl"]["master_weights"]
        assert len(masters) == len(part)
        assert {value.dtype for value in masters.values()} == {torch.float32}


@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.SGD, lr=0.1)])
def test_weights_that_are_moved_in_the_optimizer_between_two_forwards_are_those_of_the_second(strategies, make):
    """Sharpness-aware minimisation: a step's gradient is that of weights beside its own."""
    results = []
    for strategy in ("auto", strategies(stream_weights=True, cpu_adam=False), strategies(stream_weights=False)):
        torch.manual_seed(1)
        fabric, model = make_fabric(strategy), TinyTransformer(dropout=0.0)
        model, optimizer = fabric.setup(model, make(model.parameters()))
        tokens, losses = torch.randint(0, 37, (2, 8)).to(training_device.current), []
        for climbs in (True, False, True, False):
            losses.append(model(tokens).square().mean())
            fabric.backward(losses[-1])
            moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if climbs:
                ascent = [0.5 * p.grad.clone() for p in moved]
            with torch.no_grad():
                for p, each in zip(moved, ascent, strict=True):
                    p.add_(each, alpha=1 if climbs else -1)
            if not climbs:
                optimizer.step()
            optimizer.zero_grad()
        results.append(torch.stack(losses).detach())
    assert len(set(results[0].tolist())) == 4
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=0)


def test_a_frozen_model_is_placed_and_streams(strategies):
    strategy = strategies(stream_weights=True)
    fabric = make_fabric(strategy)
    with fabric.init_module():
        model = TinyTransformer(dropout=0.0)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert strategy.report()["roles"]["compute_weights"]["dram"] >= sum(p.nbytes for p in model.parameters())
    expected = copy.deepcopy(model).to(training_device.current)
    frozen = fabric.setup_module(model)
    tokens = torch.ones(2, 8, dtype=torch.long, device=training_device.current)
    with torch.no_grad():
        assert torch.equal(frozen(tokens), expected(tokens))
    assert strategy.report()["streamed"]["num_units"] == 3
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert other.config == strategy.config and other._loop is None and not other._session.runs, "it begins anew"


def test_a_module_without_weights_moves_at_once_and_one_with_weights_when_it_is_set_up(strategies):
    fabric = make_fabric(strategies())
    assert fabric.to_device(nn.BatchNorm1d(3, affine=False)).running_mean.device.type == training_device.current.type
    assert fabric.to_device(nn.Linear(2, 2)).weight.device.type == "cpu"


def of_five_blocks(strategy):
    fabric = make_fabric(strategy)
    torch.manual_seed(0)
    model = TinyTransformer(dropout=0.0, depth=5)
    return fabric, *fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


def step(fabric, model, optimizer, **zero):
    fabric.backward(model(torch.arange(16, device=training_device.current).view(2, 8)).square().mean())
    optimizer.step()
    optimizer.zero_grad(**zero)


def test_an_optimizer_that_is_loaded_alone_brings_no_weights_back(strategies):
    runs = []
    for given in ("auto", strategies()):
        parts = _, model, optimizer = of_five_blocks(given)
        start = weights_of(model)
        step(*parts)
        saved = copy.deepcopy(optimizer.state_dict())
        model.load_state_dict(start)
        optimizer.load_state_dict(saved)
        step(*parts)
        runs.append(weights_of(model))
    assert_equal(*runs)


def test_parameters_that_join_an_optimizer_of_master_weights(strategies):
    """Fabric's wrapper of the optimizer has methods of its class, not of the object."""
    runs = []
    for later in (True, False):
        fabric = make_fabric(strategies(master="fp32"), "bf16-true")
        torch.manual_seed(0)
        model = TinyTransformer(dropout=0.0)
        first, joining = [*model.embed.parameters()], [*model.blocks.parameters(), *model.head.parameters()]
        optimizer = torch.optim.AdamW(first if later else first + joining, lr=1e-2)
        model, optimizer = fabric.setup(model, optimizer)
        if later:
            optimizer.add_param_group({"params": joining})
        for _ in range(2):
            step(fabric, model, optimizer)
        runs.append(weights_of(model))
    assert_equal(*runs)


@pytest.mark.parametrize("after", ["fp32", "split"])
@pytest.mark.parametrize("before", ["fp32", "split"])
def test_masters_that_are_loaded_with_an_optimizer_alone_leave_the_models_weights(strategies, before, after):
    saved, steps = None, 5
    for master in (before, after):
        fabric = make_fabric(strategies(master=master), precision="bf16-true")
        torch.manual_seed(0)
        model = TinyTransformer(dropout=0.0)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0))
        if saved is not None:
            optimizer.load_state_dict(saved)
            optimizer.param_groups[0]["lr"], steps = 0.0, 1
        start = weights_of(model)
        for _ in range(steps):
            step(fabric, model, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
    assert_equal(weights_of(model), start)


def test_a_gradient_that_was_set_to_zero_is_no_part_of_a_sum_for_hooks(strategies):
    fabric, model, optimizer = of_five_blocks(strategies(stream_weights=True))
    seen = []
    model.module.blocks[1].qkv.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    for _ in range(3):
        step(fabric, model, optimizer, set_to_none=False)
    assert len(seen) == 3


@pytest.mark.parametrize("kept", ["gradients", "views"])
def test_gradients_that_are_kept_may_be_changed_when_the_step_has_returned(strategies, late_copies, kept):
    results = []
    for strategy in (strategies(stream_weights=True, overlap_step=False), strategies(stream_weights=True)):
        torch.manual_seed(1)
        fabric, model = make_fabric(strategy), TinyTransformer(depth=5, dropout=0.0)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        tokens, losses = torch.randint(0, 37, (2, 8)).to(training_device.current), []
        for _ in range(4):
            losses.append(model(tokens).square().mean())
            fabric.backward(losses[-1])
            mine = [
                p.grad if kept == "gradients" else p.grad.view(-1) for p in model.parameters() if p.grad is not None
            ]
            optimizer.step()
            for gradient in mine:
                gradient.zero_()
            optimizer.zero_grad()
        results.append(([loss.item() for loss in losses], weights_of(model)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


def test_a_backward_for_some_weights_that_stream_is_refused(strategies):
    fabric, model = make_fabric(strategies(stream_weights=True)), TinyTransformer()
    model, _ = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    loss = model(torch.randint(0, 37, (2, 8)).to(training_device.current)).square().mean()
    with pytest.raises(UnsupportedError, match="finds no weights that stream, such as those of unit `blocks"):
        fabric.backward(loss, inputs=model.blocks.parameters(), retain_graph=True)
    fabric.backward(loss, inputs=model.head.weight)
    assert model.head.weight.grad is not None and model.embed.weight.grad is None
