"""Loops of Fabric with our strategy and without it: the same losses and weights, files for both."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import lightning_cxl
from lightning_cxl import CXLFabricStrategy
from lightning_cxl.errors import ConfigError, LightningCXLWarning, UnsupportedError
from tests import training_device
from tests.integration.fabric_loop import make_fabric
from tests.integration.training import EXACT, assert_identical
from tests.models import TinyTransformer, token_data

NUM_STEPS = 6


@pytest.fixture
def strategies():
    """Make strategies of ours, which are torn down at the end."""
    made = []

    def make(**options):
        made.append(CXLFabricStrategy(**options))
        return made[-1]

    yield make
    while made:
        made.pop().teardown()


class Loop:
    """A loop as in LitGPT: accumulates, clips, steps, schedules."""

    def __init__(self, strategy="auto", precision=None, *, accumulate=2, clip=None, trained=None, **kinds):
        self.fabric = make_fabric(strategy, precision)
        torch.manual_seed(3)
        model = TinyTransformer(dropout=0.0, **kinds)
        optimizer = torch.optim.AdamW((trained or nn.Module.parameters)(model), lr=1e-2)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.scheduler = LinearLR(self.optimizer, total_iters=4)
        self.accumulate, self.clip, self.losses = accumulate, clip or {}, []
        self.at = 0

    def run(self, num_steps=NUM_STEPS):
        batches = list(self.fabric.setup_dataloaders(token_data(NUM_STEPS * self.accumulate)))
        for _ in range(num_steps):
            for part in range(self.accumulate):
                tokens, labels = batches[self.at]
                self.at += 1
                with self.fabric.no_backward_sync(self.model, enabled=part < self.accumulate - 1):
                    loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1).float(), labels.flatten())
                    self.fabric.backward(loss / self.accumulate)
                self.losses.append(loss.item())
            if self.clip:
                self.fabric.clip_gradients(self.model, self.optimizer, **self.clip)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return self

    def weights(self):
        return {name: value.cpu().clone() for name, value in self.model.state_dict().items()}

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "at": self.at}

    def load(self, path):
        state = self.state()
        self.fabric.load(path, state)
        self.at = state["at"]
        return self


def assert_same(ours, plain, compare=assert_identical):
    compare((plain.losses, plain.weights()), (ours.losses, ours.weights()))


def test_the_optimizer_by_name(strategies):
    loop = Loop("cxl_offload").run(2)
    assert isinstance(loop.fabric.strategy, CXLFabricStrategy)
    assert "CPUAdam" in str(loop.fabric.strategy)
    loop.fabric.strategy.teardown()


def test_a_loss_scaler_finds_gradients_on_the_host(strategies):
    if training_device.current.type == "cpu":
        pytest.skip("fabric has no float16 on the CPU")
    ours = Loop(strategies(**EXACT), "16-mixed", clip={"max_norm": 0.1}).run()
    assert_same(ours, Loop("auto", "16-mixed", clip={"max_norm": 0.1}).run())


def test_a_file_has_the_master_weights_of_its_own_optimizer_only(strategies):
    fabric = make_fabric(strategies(master="fp32"), "bf16-true")
    model = TinyTransformer()
    parts = list(model.blocks.parameters()), [*model.embed.parameters(), *model.head.parameters()]
    model, *optimizers = fabric.setup(model, *(torch.optim.AdamW(part, lr=1e-2) for part in parts))
    for optimizer, part in zip(optimizers, parts, strict=True):
        masters = optimizer.state_dict()["lightning_cxl"]["master_weights"]
        assert len(masters) == len(part)
        assert {value.dtype for value in masters.values()} == {torch.float32}


def test_an_update_that_runs_behind_is_in_the_file(strategies):
    if training_device.current.type != "apart":
        pytest.skip("no update runs behind")
    training_device.make_late("copies")
    loop = Loop(strategies(overlap_step=True), accumulate=1).run(2)
    saved = copy.deepcopy(loop.optimizer.state_dict())
    now = loop.optimizer.state_dict()
    for key, entry in now["state"].items():
        assert all(torch.equal(value, saved["state"][key][name]) for name, value in entry.items()), key
    assert {float(entry["step"]) for entry in saved["state"].values()} == {2.0}


def adversaries(strategy):
    """Train two models against each other, set up apart from their optimizers; returns losses and weights."""
    fabric = make_fabric(strategy)
    torch.manual_seed(5)
    models = [TinyTransformer(dropout=0.0), TinyTransformer(dropout=0.0)]
    first, second = (fabric.setup_module(model) for model in models)
    optimizers = fabric.setup_optimizers(*(torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (first, second)))
    losses = []
    for tokens, _ in list(fabric.setup_dataloaders(token_data(4))):
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            loss = sign * nn.functional.mse_loss(first(tokens), second(tokens))
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses, [value.cpu().clone() for model in (first, second) for value in model.state_dict().values()]


def test_two_models_are_trained_side_by_side(strategies):
    strategy = strategies(**EXACT)
    losses, weights = adversaries(strategy)
    report = strategy.report()
    expected_losses, expected = adversaries("auto")
    assert losses == expected_losses
    assert all(map(torch.equal, weights, expected))
    count = sum(p.numel() for p in TinyTransformer().parameters())
    assert report["num_parameters"] == 2 * count and len(report["optimizers"]) == 1  # of two, the same line
    assert sum(report["planned_roles"]["momentum"].values()) >= 2 * 4 * count


def test_a_frozen_model_is_placed_and_streams(strategies):
    fabric = make_fabric(strategies(stream_weights=True))
    model = TinyTransformer(dropout=0.0)
    expected = copy.deepcopy(model).to(training_device.current)
    frozen = fabric.setup_module(model)
    tokens = torch.ones(2, 8, dtype=torch.long, device=training_device.current)
    with torch.no_grad():
        assert torch.equal(frozen(tokens), expected(tokens))
    assert fabric.strategy.report()["streamed"]["num_units"] == 3


def test_a_module_that_is_only_moved_is_placed_when_it_is_called(strategies):
    fabric = make_fabric(strategies(stream_weights=True))
    model = fabric.to_device(TinyTransformer(dropout=0.0))
    expected = copy.deepcopy(model)
    assert not fabric.strategy._session.runs
    tokens = torch.ones(2, 8, dtype=torch.long, device=training_device.current)
    with torch.no_grad():
        found = model(tokens)
        assert found.device == training_device.current
        assert torch.equal(found, expected.to(training_device.current)(tokens))
    assert fabric.strategy.report()["streamed"]["num_units"] == 3


def test_an_optimizer_without_its_model_is_refused(strategies):
    fabric = make_fabric(strategies())
    with pytest.raises(ConfigError, match="was not prepared"):
        fabric.setup_optimizers(torch.optim.AdamW(TinyTransformer().parameters()))
    model = TinyTransformer()
    other = torch.optim.AdamW([*model.parameters(), *TinyTransformer().parameters()])
    with pytest.raises(ConfigError, match="are not in the model"):
        fabric.setup(model, other)


def test_a_second_optimizer_that_comes_later_is_refused(strategies):
    loop = Loop(strategies())
    with pytest.raises(UnsupportedError, match="A model and all its optimizers belong in one call"):
        loop.fabric.setup_optimizers(torch.optim.SGD(loop.model.parameters(), lr=0.1))


def test_parameters_that_a_module_makes_when_it_moves_are_trained(strategies):
    fabric, model = make_fabric(strategies()), TinyTransformer()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    fabric.backward(model(torch.ones(2, 8, dtype=torch.long, device=training_device.current)).square().sum())
    optimizer.step()
    now = {name: value.cpu() for name, value in model.state_dict().items()}
    assert {name for name, value in now.items() if torch.equal(value, before[name])} == {"unused.weight", "unused.bias"}


def test_the_first_bad_gradient_is_named_although_clipping_spoils_all(strategies):
    loop = Loop(strategies(), accumulate=1)
    tokens = torch.ones(2, 8, dtype=torch.long, device=training_device.current)
    loop.fabric.backward(loop.model(tokens).sum())
    (gradient,) = (p.grad for p in loop.model.module.blocks[1].out.parameters() if p.dim() == 1)
    gradient[3] = torch.inf
    loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=1.0, error_if_nonfinite=False)
    with pytest.warns(LightningCXLWarning, match=r"blocks\.1\.out\.bias"):
        loop.optimizer.step()


def test_several_devices_need_a_launch(strategies):
    strategy = strategies()
    loop = Loop(strategy)
    loop.fabric.strategy.teardown()
    strategy.parallel_devices = [training_device.current] * 2
    with pytest.raises(RuntimeError, match="launch"):
        strategy.setup_module(TinyTransformer())
    strategy.parallel_devices = [training_device.current]


def test_a_module_is_created_on_its_tier(strategies):
    strategy = strategies(stream_weights=True)
    with make_fabric(strategy).init_module():
        model = TinyTransformer()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert strategy.report()["roles"]["compute_weights"]["dram"] >= sum(p.nbytes for p in model.parameters())


def test_what_was_torn_down_is_plain(strategies):
    loop = Loop(strategies()).run(2)
    model, optimizer = loop.model.module, loop.optimizer.optimizer
    loop.fabric.strategy.teardown()
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert not model._forward_pre_hooks
    assert not {"state_dict", "load_state_dict", "step"} & vars(optimizer).keys()
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert held == set(model.parameters())
    model(torch.ones(2, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    assert loop.fabric.strategy.report()["state"] == "finished"


def test_a_setup_that_fails_leaves_the_model_plain(strategies, monkeypatch):
    strategy, model = strategies(), TinyTransformer(dropout=0.0)

    def fail(*_):
        raise ZeroDivisionError

    fabric = make_fabric(strategy)
    with monkeypatch.context() as patched:
        patched.setattr("lightning_cxl.run.run.Run.adopt", fail)
        with pytest.raises(ZeroDivisionError):
            fabric.setup(model, torch.optim.AdamW(model.parameters()))
    assert not strategy._session.runs
    fabric.setup(model, torch.optim.AdamW(model.parameters()))
    assert strategy.report()["state"] == "running"


def test_copies_of_a_strategy_begin_anew(strategies):
    strategy = strategies(num_threads=1)
    Loop(strategy).run(1)
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert other.config == strategy.config and other._loop is None and not other._session.runs


def test_the_strategy_in_the_signature_has_the_options():
    assert "tier_rules" in str(lightning_cxl.CXLFabricStrategy.__init__.__signature__)


def test_gradients_are_complete_after_each_backward(strategies):
    def gradients(loop):
        offload = getattr(loop.fabric.strategy, "offload", None)
        parameters = list(loop.model.parameters())
        (tokens, labels), *_ = loop.fabric.setup_dataloaders(token_data(1))
        for _ in range(2):
            loss = nn.functional.cross_entropy(loop.model(tokens).flatten(0, 1), labels.flatten())
            loop.fabric.backward(loss)
            held = parameters if offload is None else offload.holders(parameters)
            yield [p.grad.cpu().clone() for p in held if p.grad is not None]

    for plain, ours in zip(gradients(Loop()), gradients(Loop(strategies(**EXACT))), strict=True):
        assert len(plain) == len(ours) > 9
        assert all(map(torch.equal, plain, ours))


def test_masters_go_with_the_training_though_the_user_keeps_the_optimizer(strategies):
    loop = Loop(strategies(**EXACT, master="fp32"), "bf16-true").run(2)
    masters = [weakref.ref(each) for each in loop.fabric.strategy.offload.holders(loop.model.parameters())]
    assert {each().dtype for each in masters} == {torch.float32}
    loop.fabric.strategy.teardown()
    gc.collect()
    assert not any(each() is not None for each in masters)


def test_parameters_that_join_in_the_middle_train_as_with_fabric(strategies):
    def joined(*strategy):
        loop = Loop(*strategy, trained=lambda model: model.blocks.parameters())
        loop.run(2)
        first = loop.optimizer.param_groups[0]
        loop.optimizer.param_groups.append({**first, "params": [*loop.model.head.parameters()]})
        return loop.run(2)

    assert_same(joined(strategies(**EXACT)), joined())
