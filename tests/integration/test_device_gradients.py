"""Gradients that come from a device: all of them, once, at the right place, whatever the host does meanwhile."""

import itertools
import threading
import time
from typing import ClassVar

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.gradients.offload import GradientOffload
from lightning_cxl.optim.cpu_adam import AdamStep
from tests import training_device
from tests.cases import every_pair, every_value
from tests.integration.training import EXACT, assert_equal, assert_same, fit, offload
from tests.models import Task, TinyTransformer, token_data

IGNORE = {"on_overflow": "ignore"}  # updates run behind the backward


class AddsLast(nn.Module):
    """The gradient of `shift` needs nothing that is recomputed: it comes before the unit is entered in backward."""

    def __init__(self, width, length):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.shift = nn.Parameter(torch.zeros(length, width))

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) + self.shift


class Shifted(TinyTransformer):
    def __init__(self, length=12):
        super().__init__(dropout=0.0)
        self.blocks = nn.ModuleList(AddsLast(32, length) for _ in range(4))

    def forward(self, tokens):
        x = self.embed(tokens)[0]  # without a batch, so that the gradient of `shift` is that of the output itself
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(("options", "accumulate"), every_value([EXACT, {}, IGNORE], [1, 3]), ids=str)
def test_a_parameter_that_is_added_last(options, accumulate):
    arguments = {"make_model": Shifted, "accumulate_grad_batches": accumulate, "data": token_data(batch=1)}
    ours = fit(offload(**options), **arguments)
    assert_same(ours, fit("auto" if options is EXACT else offload(stream_weights=False), **arguments))


def test_a_penalty_on_streamed_weights_is_refused_in_words():
    class Penalised(Task):
        def loss(self, batch):
            return super().loss(batch) + self.model.blocks[1].qkv.weight.square().sum().to(self.device)

    with pytest.raises(UnsupportedError, match=r"qkv.weight` got a gradient on `cpu`.*into the unit's forward"):
        fit(offload(), task=Penalised)


class FailsElsewhere(Task):
    """Trains a parameter that is not registered, so that nobody has moved it to the device.

    The backward fails in the host's thread of autograd, while the device's is within a unit.
    """

    def __init__(self, *args):
        super().__init__(*args, scheduler=False)
        self.hidden = [nn.Parameter(torch.zeros(37, dtype=torch.bfloat16))]

    def loss(self, batch):
        return super().loss(batch) + self.hidden[0].to(self.device).sum()

    def configure_optimizers(self):
        self.hidden[0].register_hook(lambda _: time.sleep(0.02))
        for parameter in self.model.blocks.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: time.sleep(0.05))
        return torch.optim.SGD([*self.parameters(), *self.hidden], lr=0.1)


@pytest.mark.usefixtures("device_apart")
def test_after_a_backward_that_failed_in_one_thread_weights_can_be_saved(tmp_path):
    saves = LambdaCallback(on_exception=lambda trainer, *_: trainer.save_checkpoint(tmp_path / "last.ckpt"))
    with pytest.raises(UnsupportedError, match=r"unnamed.* got a gradient on `cpu`.*Register it in the module"):
        fit(offload(), task=FailsElsewhere, callbacks=[saves])
    seed_everything(5, verbose=False)
    saved = torch.load(tmp_path / "last.ckpt", map_location="cpu")["state_dict"]
    assert_equal(saved, Task(TinyTransformer(dropout=0.0)).state_dict())


@pytest.mark.usefixtures("device_apart")
def test_a_backward_that_fails_before_anything_of_ours_is_over_too():
    """It fails in the host's thread of autograd while the device's has not come to anything of ours yet."""
    ended = []

    def on_device(grad):
        time.sleep(0.5)
        ended.append(True)

    def fail(grad):
        time.sleep(0.1)
        raise ZeroDivisionError

    class FailsBeforeOurs(Task):
        def loss(self, batch):
            self.model.head.weight.register_hook(on_device)
            on_host = torch.ones((), requires_grad=True)
            on_host.register_hook(fail)
            return super().loss(batch) + on_host.to(self.device)

    with pytest.raises(ZeroDivisionError):
        fit(offload(), task=FailsBeforeOurs)
    assert ended == [True]


@pytest.mark.parametrize("late", ["to the host"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}], ids=str)
def test_gradients_are_waited_for_at_the_step_only(options, late, monkeypatch):
    training_device.needs_late()
    settled, settle = [], GradientOffload._settle
    monkeypatch.setattr(GradientOffload, "_settle", lambda self: (settled.append(bool(self._groups)), settle(self))[1])
    arguments = {"accumulate_grad_batches": 4, "steps": 3, **options}
    ours = fit(offload(**EXACT), **arguments)
    assert settled.count(True) == 3
    assert_same(ours, fit("auto", **arguments))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_masters_of_what_stays_on_the_device_are_updated_when_their_gradients_come(precision, monkeypatch):
    at_the_step, apply = [], AdamStep.apply

    def notes(step, work, scale):
        if threading.current_thread() is threading.main_thread():
            at_the_step.append(len(work))
        apply(step, work, scale)

    monkeypatch.setattr(AdamStep, "apply", notes)
    arguments = {"precision": precision, "accumulate_grad_batches": 2}
    ours = fit(offload(**IGNORE), **arguments)
    assert at_the_step == [0] * 4
    monkeypatch.undo()
    assert_same(ours, fit(offload(overlap_step=False), **arguments))


class LooksAtTheHead(TinyTransformer):
    """Its units read weights that stay on the device, also when they are recomputed, after their gradient has come."""

    def __init__(self):
        super().__init__(dropout=0.0)
        for block in self.blocks:
            block.norm2 = Reads(self.head.weight)


class Reads(nn.LayerNorm):
    def __init__(self, weight):
        super().__init__(32)
        self.beside = [weight]

    def forward(self, x):
        assert self.beside[0].device == x.device
        return super().forward(x) * (1 + self.beside[0].detach().mean())


def test_weights_that_stay_are_as_they_were_until_the_backward_is_over():
    arguments = {"make_model": LooksAtTheHead, "optimizer": "adam"}
    assert_same(fit(offload(**IGNORE), **arguments), fit(offload(overlap_step=False), **arguments))


class BackwardTwice(Task):
    """A hook runs the backward that Lightning is about to run, when a step's updates may begin already."""

    def on_before_backward(self, loss):
        loss.backward(retain_graph=True)


def test_a_gradient_that_comes_after_its_update_is_refused_and_not_lost():
    with pytest.raises(UnsupportedError, match=r"got a gradient after its update had begun.*overlap_step=False"):
        fit(offload(**IGNORE), task=BackwardTwice)
    assert_same(fit(offload(), task=BackwardTwice), fit(offload(stream_weights=False), task=BackwardTwice))


@pytest.mark.parametrize(
    ("late", "options", "precision"),
    every_pair(["to the device", "kernels"], [{}, IGNORE, EXACT], ["32-true", "bf16-true"]),
    indirect=["late"],
    ids=str,
)
def test_new_weights_are_on_the_device_before_they_are_read_and_masters_stay_until_then(options, precision, late):
    arguments = {"precision": precision, "steps": 5, "make_model": lambda: TinyTransformer(depth=1, dropout=0.0)}
    ours = fit(offload(**options), **arguments)
    training_device.make_late("nothing")
    assert_same(ours, fit(offload(**options, overlap_step=False), **arguments))


class ZeroesInTheWindow(Task):
    """Leaves the micro-batches so far out of the step, as if one of them were bad."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 4 == 2:
            self.optimizers().zero_grad()
        return super().training_step(batch, batch_idx)


class ReadsInTheWindow(Task):
    """Adds up how large gradients are, through the optimizer's groups and through the module."""

    def training_step(self, batch, batch_idx):
        parameters = itertools.chain(*(group["params"] for group in self.optimizers().param_groups))
        self.record(sum(p.grad.double().abs().sum().cpu() for p in parameters if p.grad is not None) + torch.zeros(1))
        self.record(torch.tensor(sum(p.grad is not None for block in self.model.blocks for p in block.parameters())))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("task", "options"), every_value([ZeroesInTheWindow, ReadsInTheWindow], [{}, EXACT]), ids=str)
def test_who_looks_between_micro_batches_finds_gradients(task, options, late_copies):
    """Nobody has announced a look: gradients may be on their way when it comes."""
    arguments = {"task": task, "accumulate_grad_batches": 4, "steps": 3}
    ours, plain = fit(offload(**options), **arguments), fit("auto", **arguments)
    if options:
        assert ours[0].losses[:2] == plain[0].losses[:2]
        assert len(set(plain[0].losses)) > 1
    assert ours[0].losses == pytest.approx(plain[0].losses, rel=1e-6)


class ReentrantBlock(nn.Module):
    """Has two backwards inside of its own, the first of which ends in the middle of it."""

    is_there: ClassVar[list[bool]] = []  # whether its weights are, after the first of these backwards

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, *, scale):
        x = x + checkpoint(lambda t: torch.tanh(self.first(t)), x, use_reentrant=True)
        x.register_hook(lambda grad: self.is_there.append(self.first.weight.device == grad.device))
        return x + checkpoint(lambda t: torch.tanh(self.second(t)), x, use_reentrant=True)


def reentrant():
    model = TinyTransformer(depth=4)
    model.blocks = nn.ModuleList(ReentrantBlock() for _ in range(4))
    model.head.requires_grad_(False)  # the first gradient comes from inside
    model.norm.requires_grad_(False)
    return model


@pytest.mark.parametrize("options", [{}, IGNORE], ids=str)
def test_a_backward_inside_a_units_own_does_not_end_it(options):
    ours, plain = (fit(strategy, make_model=reentrant) for strategy in (offload(**options), "auto"))
    assert ours[0].losses == pytest.approx(plain[0].losses, rel=1e-5)
    assert all(ReentrantBlock.is_there) and ReentrantBlock.is_there


class StepsTwice(Task):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.loss(batch)
        self.record(loss)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("late", ["to the device"], indirect=True)
@pytest.mark.parametrize("options", [{}, EXACT], ids=str)
def test_a_second_step_waits_for_the_copies_of_the_first(options, late):
    ours = fit(offload(**options), task=StepsTwice)
    training_device.make_late("nothing")
    assert_same(ours, fit(offload(**options, stream_weights=False), task=StepsTwice))


class Partly(nn.Module):
    """Uses all its parameters in one call, and some of them in another."""

    def __init__(self, width=32):
        super().__init__()
        self.inner, self.extra = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, *, scale):
        extra = self.extra(x) if scale < 1.0 else 0.0  # made first: its gradients come last
        return x + torch.tanh(self.inner(x)) * scale + extra


def partly():
    model = TinyTransformer(depth=1, twice=True, dropout=0.0)
    model.blocks[0] = Partly()
    return model


def test_a_gradient_that_comes_again_before_its_unit_is_complete():
    """In backward the call that uses some comes first: its gradients wait for others, and come once more instead."""
    ours = fit(offload(units="model.blocks.*", **EXACT), make_model=partly)
    assert_same(ours, fit("auto", make_model=partly))
