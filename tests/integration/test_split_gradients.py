"""Gradients of bfloat16 weights that are their own masters: all that users do with ``p.grad`` keeps its meaning."""

import copy
import itertools
import warnings

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn

from tests.cases import every_value
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

pytestmark = pytest.mark.on_cpu


def fit(task, strategy=None, *, steps=1, **trainer_args):
    seed_everything(5, verbose=False)
    module = task(TinyTransformer(dropout=0.0))
    trainer = make_trainer(strategy or offload(), max_steps=steps, precision="bf16-true", **trainer_args)
    trainer.fit(module, token_data())
    return module


class Manual(Task):
    automatic_optimization = False

    def __init__(self, model):
        super().__init__(model, scheduler=False)
        self.seen = []

    @property
    def weight(self):
        return self.model.head.weight


def float32_sum(model, batches, scale=1.0):
    """Autograd's own bfloat16 gradients of single backwards, added up in float32."""
    sums = {}
    for x, y in batches:
        model.zero_grad()
        (nn.functional.cross_entropy(model(x).flatten(0, -2).float(), y.flatten()) * scale).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] = sums.get(name, 0) + p.grad.float()
    return sums


@pytest.mark.parametrize(("where", "accumulate"), every_value(["module", "callback"], [1, 3]))
def test_hooks_see_every_gradient(where, accumulate):
    """The sum of micro-batches is the float32 sum of what autograd makes of each."""

    class Look(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer=None):
            self.grads = {n: p.grad.clone() for n, p in module.model.named_parameters() if p.grad is not None}
            self.start = copy.deepcopy(module.model)

    class LookItself(Task):
        def on_before_optimizer_step(self, optimizer):
            Look.on_before_optimizer_step(self, None, self)

    look = Look()
    task, callbacks = (LookItself, []) if where == "module" else (Task, [look])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none that gradients are elsewhere
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*(CXL memory|val_dataloader|num_workers|tensorboard).*")
        module = fit(task, callbacks=callbacks, accumulate_grad_batches=accumulate)
    found = module if where == "module" else look
    batches = list(itertools.islice(token_data(), accumulate))
    expected = float32_sum(found.start, batches, scale=1 / accumulate)
    assert found.grads.keys() == expected.keys() and len(expected) == 40
    for name, grad in found.grads.items():
        assert grad.dtype == (torch.bfloat16 if accumulate == 1 else torch.float32)
        assert torch.equal(grad.float(), expected[name]), name


def test_zero_grad_to_zero_and_to_none():
    class Zero(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            for how in ("none", "zero", "module", "own"):
                self.manual_backward(self.loss(batch))
                self.seen.append(self.weight.grad.float().clone())
                if how == "module":
                    self.zero_grad()
                elif how == "own":
                    self.weight.grad = None
                else:
                    optimizer.zero_grad(set_to_none=how == "none")
                if how == "zero":
                    assert not self.weight.grad.any()
                else:
                    assert self.weight.grad is None
            optimizer.step()

    module = fit(Zero)
    assert len(module.seen) == 4 and module.seen[0].any()
    assert all(torch.equal(grad, module.seen[0]) for grad in module.seen)


def test_edited_and_replaced_gradients_are_what_the_step_uses():
    edits = {
        "in place": lambda p: p.grad.mul_(0.5),
        "data": lambda p: p.grad.data.mul_(0.5),
        "replaced": lambda p: setattr(p, "grad", p.grad * 0.5),
        "float32": lambda p: setattr(p, "grad", p.grad.float() * 0.5),
    }

    def momentum(edit):
        class Edit(Manual):
            def training_step(self, batch, batch_idx):
                optimizer = self.optimizers()
                self.manual_backward(self.loss(batch))
                if edit is not None:
                    edit(self.weight)
                self.manual_backward(self.loss(batch))
                optimizer.step()
                self.momentum = optimizer.state[self.weight]["exp_avg"].clone()

        return fit(Edit).momentum

    whole = momentum(None)
    for name, edit in edits.items():
        torch.testing.assert_close(momentum(edit), 0.75 * whole, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("first", [True, False])
def test_create_graph_keeps_the_graph(first):
    class Graph(Manual):
        def training_step(self, batch, batch_idx):
            if not first:
                self.manual_backward(self.loss(batch))
            self.loss(batch).backward(create_graph=True)
            grad = self.weight.grad
            assert grad.requires_grad
            (second,) = torch.autograd.grad(grad.float().square().sum(), self.weight)
            assert second.any()
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.grad = grad.detach().float()

    ours = fit(Graph, offload(activation_offload=False))
    plain = fit(Graph, "auto")
    torch.testing.assert_close(ours.grad, plain.grad, rtol=0.02, atol=1e-4)


def test_old_gradients_keep_their_values():
    class Keep(Manual):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            grad = self.weight.grad
            self.seen.append((grad, grad.clone()))
            if batch_idx % 2 == 0:
                self.manual_backward(self.loss(batch))  # the sum gets memory of its own, in float32
            optimizer.step()
            optimizer.zero_grad()

    module = fit(Keep, steps=4)
    assert len(module.seen) == 4
    for grad, then in module.seen:
        assert torch.equal(grad, then)
