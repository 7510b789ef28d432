"""What users do to weights, gradients and optimizers between steps and around them, while weights stream."""

import time

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.gradients import step as updates
from lightning_cxl.gradients.offload import GradientOffload
from tests import training_device
from tests.integration import training
from tests.integration.training import EXACT, assert_same, make_trainer, offload
from tests.models import Block, Task, TinyTransformer, token_data

IGNORE = {"on_overflow": "ignore"}
STAYS = {"stream_weights": False, "overlap_step": False}


pytestmark = pytest.mark.usefixtures("slow_updates", "late_copies")


def fit(options, *, make_model=TinyTransformer, task=Task, steps=6, **given):
    strategy = options if options == "auto" else offload(**options)
    return training.fit(strategy, make_model, task=lambda model, _: task(model), steps=steps, **given)


def assert_as_plain(*, plain_task=None, **arguments):
    plain = arguments if plain_task is None else {**arguments, "task": plain_task}
    assert_same(fit(EXACT, **arguments), fit("auto", **plain))
    plain = fit({"overlap_step": False}, **arguments)
    for options in ({}, IGNORE):
        assert_same(fit(options, **arguments), plain)


# -- writes between steps ----------------------------------------------------------------------------------------------
# To weights that stream, which are their own masters; others are written back by the next step.


class Clamps(Task):
    def on_train_batch_end(self, *_):
        time.sleep(0.02)
        for parameter in self.model.blocks.parameters():
            parameter.data.clamp_(-0.05, 0.05)


class ClampsGroups(Task):
    def on_train_batch_end(self, *_):
        streamed = set(self.model.blocks.parameters())
        with torch.no_grad():
            for group in self.optimizers().param_groups:
                for parameter in streamed.intersection(group["params"]):
                    parameter.clamp_(-0.05, 0.05)


class Shrinks(Task):
    def on_train_batch_end(self, *_):
        flat = nn.utils.parameters_to_vector(self.model.blocks.parameters()) * 0.9
        nn.utils.vector_to_parameters(flat, self.model.blocks.parameters())


class ByReference(Task):
    """Leaves no trace: neither a look nor a new version."""

    def on_train_start(self):
        self.held = [list(block.parameters()) for block in self.model.blocks]

    def on_train_batch_end(self, *_):
        torch.accelerator.synchronize()  # nobody else sees to it that no copy is under way
        for parameter in self.held[0]:
            parameter.data.mul_(0.9)
        for parameter in self.held[1]:
            parameter.data = parameter.data * 0.9


def test_writes_that_leave_no_trace_count():
    arguments = {"task": ByReference, "accumulate_grad_batches": 2}  # also where no step makes copies old
    assert_same(fit(EXACT, **arguments), fit("auto", **arguments))


class Rotates(TinyTransformer):
    """Begins with another block every time: what is fetched when a backward ends is a wrong guess."""

    num_calls = 0

    def forward(self, tokens):
        self.num_calls += 1
        x = self.embed(tokens)
        for index in range(len(self.blocks)):
            x = self.blocks[(self.num_calls + index) % len(self.blocks)](x, scale=0.5)
        return self.head(self.norm(x))


@pytest.mark.parametrize("options", [EXACT, {}], ids=["torch AdamW", "CPUAdam"])
def test_a_step_does_not_write_what_is_being_fetched(options):
    training_device.make_late("to the device, much")
    arguments = {"make_model": lambda: Rotates(depth=6)}
    plain = "auto" if options is EXACT else {"overlap_step": False}
    assert_same(fit(options, **arguments), fit(plain, **arguments))


@pytest.mark.parametrize("task", [Clamps, ClampsGroups, Shrinks])
def test_writes_between_steps_count(task):
    # the groups of the reference may hold masters of what stays on the device
    assert_as_plain(task=task, plain_task=Clamps if task is ClampsGroups else None)


class Validates(Task):
    def validation_step(self, batch, batch_idx):
        self.record(self.loss(batch))


def test_averaged_weights_are_swapped_in_and_out():
    def run(options):
        average = EMAWeightAveraging(decay=0.5)
        return fit(
            options, task=Validates, make_model=lambda: TinyTransformer(dropout=0.0), steps=8, callbacks=[average],
            val_check_interval=4, validation=token_data(num_batches=2),
        )  # fmt: skip

    plain = run(STAYS)
    for options in ({}, {"overlap_step": False}):
        assert_same(run(options), plain)


# -- gradients ---------------------------------------------------------------------------------------------------------


class ZeroesInPlace(Task):
    automatic_optimization = False

    def __init__(self, model):
        super().__init__(model, scheduler=False)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.record(loss)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(("options", "accumulate"), [({}, 2), (IGNORE, 1), ({"overlap_step": False}, 2)])
def test_a_block_used_twice_keeps_both_gradients(options, accumulate):
    """Autograd delivers one gradient per use here, where devices differ: they are added in another order than by it."""
    arguments = {"make_model": lambda: TinyTransformer(twice=True), "accumulate_grad_batches": accumulate}
    ours, plain = fit(options, **arguments), fit({**options, **STAYS}, **arguments)
    assert ours[0].losses == pytest.approx(plain[0].losses, rel=1e-5)


class Skips(TinyTransformer):
    """Leaves the first block out of every second forward."""

    num_calls = 0

    def forward(self, tokens):
        self.num_calls += 1
        x = self.embed(tokens)
        for block in self.blocks[self.num_calls % 2 :]:
            x = block(x, scale=0.5)
        return self.head(self.norm(x))


def test_a_skipped_block_whose_update_is_late(monkeypatch):
    arrived = updates.Updates._update_arrived

    def late(self, *args):
        time.sleep(0.05)
        arrived(self, *args)

    monkeypatch.setattr(updates.Updates, "_update_arrived", late)
    assert_same(fit(IGNORE, make_model=Skips), fit({**IGNORE, **STAYS}, make_model=Skips))


def test_the_real_error_of_a_gradient_is_raised(monkeypatch):
    accumulate = GradientOffload._accumulate

    def fails(self, group):
        if any("blocks.1" in each.pair.name for each in group.gradients):
            raise RuntimeError("the real reason")
        time.sleep(0.002)
        accumulate(self, group)

    monkeypatch.setattr(GradientOffload, "_accumulate", fails)
    with pytest.raises(RuntimeError, match="the real reason"):
        fit(IGNORE)


class Appends(Block):
    def __init__(self, there):
        super().__init__(32, 0.1)
        self.router, self.there = nn.Linear(32, 4), there

    def forward(self, x, collected):
        shares = self.router(x).softmax(-1)
        collected["losses"].append(shares.square().mean().to(self.there))
        collected["states"].append(super().forward(x) * shares[..., :1])
        return collected["states"][-1]


class Collects(TinyTransformer):
    """Every block appends a loss and its result to lists that the model reads: more blocks than slots."""

    def __init__(self, there):
        super().__init__(depth=0)
        self.blocks = nn.ModuleList(Appends(there) for _ in range(6))

    def forward(self, tokens):
        x = self.embed(tokens)
        collected = {"losses": [], "states": [x]}
        for block in self.blocks:
            x = block(x, collected)
        assert len(collected["losses"]) == 6 and len(collected["states"]) == 7
        self.losses = collected["losses"]
        return self.head(self.norm(sum(collected["states"])))


class AddsLosses(Task):
    def loss(self, batch):
        loss = super().loss(batch)
        return loss + sum(self.model.losses).to(loss.device)


@pytest.mark.parametrize("late", ["copies and kernels"], indirect=True)
@pytest.mark.parametrize("there", [None, "cpu"])
def test_losses_that_blocks_append_to_a_list_of_the_model(late, there):
    assert_as_plain(make_model=lambda: Collects(there), task=AddsLosses, steps=3)


# -- other optimizers --------------------------------------------------------------------------------------------------


def second_sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-1, weight_decay=0.1)


def second_hooked(parameters):
    optimizer = torch.optim.AdamW(parameters, lr=1e-1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize("second", [second_sgd, second_hooked])
def test_a_second_optimizer_over_the_same_weights(second):
    class Two(ZeroesInPlace):
        def configure_optimizers(self):
            own = list(self.model.blocks.parameters())
            return [torch.optim.AdamW(own, lr=1e-2), second(own)]

        def training_step(self, batch, batch_idx):
            first, other = self.optimizers()
            loss = self.loss(batch)
            self.record(loss)
            self.manual_backward(loss)
            first.step()
            other.step()
            first.zero_grad()

    assert_same(fit({}, task=Two), fit({"overlap_step": False}, task=Two))


# -- errors and the end ------------------------------------------------------------------------------------------------


class Fails(TinyTransformer):
    def forward(self, tokens):
        out = super().forward(tokens)
        self.blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)  # in the recompute, the last of the backward
        return out


@pytest.mark.parametrize("options", [{}, IGNORE])
def test_after_an_error_in_a_recompute_weights_are_on_the_host(options):
    seed_everything(5, verbose=False)
    module = Task(Fails())
    trainer = make_trainer(offload(**options), max_steps=2)
    homes = {}

    def remember(*_):
        homes.update({name: p.data_ptr() for name, p in module.model.blocks.named_parameters()})

    module.on_train_start = remember
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, token_data())
    assert {name: p.data_ptr() for name, p in module.model.blocks.named_parameters()} == homes


class LeavesSomeOut(Task):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for name, p in self.model.named_parameters() if "qkv" not in name], lr=1e-3)


def test_a_gradient_that_no_optimizer_waits_for_is_refused():
    module = LeavesSomeOut(TinyTransformer())
    with pytest.raises(UnsupportedError, match=r"blocks.2`: no optimizer has `qkv.weight`, `qkv.bias`, which"):
        make_trainer(offload(), max_steps=2).fit(module, token_data())
    assert module.model.blocks[2].qkv.weight.grad is None
    assert all(p.device.type == "cpu" for p in module.model.blocks.parameters())
    assert_same(fit({**EXACT, **STAYS}, task=LeavesSomeOut), fit("auto", task=LeavesSomeOut))


class RollsBack(Task):
    """Goes back to an earlier state of the optimizer, whose first parameter streams."""

    def configure_optimizers(self):
        own = [p for name, p in self.named_parameters() if "blocks" in name]
        return torch.optim.AdamW(own[::-1], lr=3e-3)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        optimizer = self.trainer.optimizers[0]
        if batch_idx == 1:
            state = optimizer.state_dict()
            saved = {i: {k: v.clone() for k, v in entry.items()} for i, entry in state["state"].items()}
            self.saved = {**state, "state": saved}
        if batch_idx == 3:
            optimizer.load_state_dict(self.saved)


def test_an_optimizer_that_is_rolled_back_between_steps():
    assert_same(fit({}, task=RollsBack), fit({"overlap_step": False}, task=RollsBack))
