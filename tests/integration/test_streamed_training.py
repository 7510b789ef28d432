"""What is left where during and after a backward through streamed units."""

from functools import partial

import pytest
import torch

from tests import training_device
from tests.cases import every_value
from tests.integration.training import EXACT, offload, train
from tests.models import Task, TinyTransformer

pytestmark = pytest.mark.usefixtures("late_copies")


class Manual(Task):
    """Two micro-batches a step, by hand; keeps copies of the gradients of the blocks after each."""

    automatic_optimization = False

    def __init__(self, *args):
        super().__init__(*args, scheduler=False)
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.record(loss)
        self.beside()
        self.manual_backward(loss)
        self.seen.append({name: p.grad.cpu().clone() for name, p in self.model.blocks.named_parameters()})
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def beside(self):
        pass


def gradients(task, strategy):
    made = []

    def make(*args):
        made.append(task(*args))
        return made[-1]

    losses, _ = train(TinyTransformer, strategy, task=make, steps=3)
    return losses, made[-1]


def assert_same_gradients(task):
    losses, plain = gradients(task, "auto")
    ours_losses, ours = gradients(task, offload(**EXACT))
    assert ours_losses == losses and len(ours.seen) == len(plain.seen) == 6
    for mine, theirs in zip(ours.seen, plain.seen, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), name
    return ours


class OnTheHost(Manual):
    def beside(self):
        if len(self.seen) % 2 and self.model.blocks[0].qkv.weight.grad.device.type == "cpu":
            self.num_on_host = getattr(self, "num_on_host", 0) + 1


def test_gradients_are_on_the_host_when_backward_returns():
    assert assert_same_gradients(OnTheHost).num_on_host == 3


class AsksForOthers(Manual):
    def beside(self):
        """`torch.autograd.grad` recomputes the same units, but delivers nothing."""
        tokens = torch.arange(12, device=self.device).view(1, 12)
        x = self.model.embed(tokens).detach().requires_grad_()
        y = x
        for block in self.model.blocks:
            y = block(y)
        (grad,) = torch.autograd.grad(y.square().mean(), x)
        self.record(grad.norm())


def test_gradients_asked_for_beside_leave_those_so_far_alone():
    assert_same_gradients(AsksForOthers)


def triple(parameter):
    parameter.grad.mul_(3)


class Hooked(Manual):
    """Puts a hook on before the run, and another one in it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.model.blocks[1].qkv.weight.register_post_accumulate_grad_hook(triple)

    def beside(self):
        if len(self.seen) == 1:
            self.model.blocks[1].out.weight.register_post_accumulate_grad_hook(triple)

    def training_step(self, batch, batch_idx):  # one micro-batch a step: hooks find no sum in `p.grad` where it streams
        super().training_step(batch, 1)


def test_hooks_of_the_user_come_before_the_gradient_leaves():
    losses, plain = gradients(Hooked, "auto")
    ours_losses, ours = gradients(Hooked, offload(**EXACT))
    assert ours_losses == losses and ours.seen[2].keys() == plain.seen[2].keys()
    assert all(torch.equal(ours.seen[2][name], value) for name, value in plain.seen[2].items())


# -- memory of the device ----------------------------------------------------------------------------------------------


ROUND = 1 << 16  # the gradients of one unit: how many are on their way is a matter of time


class Casts(Task):
    """Casts under an autocast of its own, which keeps the casts of weights."""

    def training_step(self, batch, batch_idx):
        with torch.autocast(training_device.current.type, torch.bfloat16):
            return super().training_step(batch, batch_idx)


def peaks(depth, options, task):
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    losses, _ = train(partial(TinyTransformer, depth=depth), offload(**options), steps=3, task=task)
    assert len(losses) == 3
    return torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()


KINDS = {
    "behind the forward": ({}, Task),
    "behind the backward": ({"on_overflow": "ignore"}, Task),
    "autocast": ({}, Casts),
}


@pytest.mark.parametrize(("late", "kind"), every_value(["nothing", "kernels", "copies"], KINDS))
def test_the_peak_does_not_grow_with_the_number_of_units(late, kind):
    options, task = KINDS[kind]
    if training_device.current.type == "cpu":
        pytest.skip("needs a device apart")
    training_device.make_late(late)  # late kernels let the host run far ahead
    few, many = peaks(6, options, task), peaks(18, options, task)
    assert many == pytest.approx(few, abs=ROUND)
