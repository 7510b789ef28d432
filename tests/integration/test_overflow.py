"""Gradients that are infinite or not a number, under the Trainer: steps left out, the end of a run, or no look."""

import math
import warnings

import pytest
import torch
from lightning.pytorch import Callback

import lightning_cxl
from lightning_cxl import GradientOverflowError
from tests.cases import every_value
from tests.integration.training import EXACT, run
from tests.models import Task, TinyTransformer

pytestmark = pytest.mark.on_cpu


class Poisoned(Task):
    """Adds `poison` to the loss of the given batches: 0 times infinity reaches one parameter only, or all."""

    def __init__(self, model, bad=(2,), parts=("blocks.1.out.weight", "head.weight"), **kwargs):
        super().__init__(model, **kwargs)
        self.bad, self.parts = bad, parts
        self.history = []

    def loss(self, batch):
        loss = super().loss(batch)
        if self.trainer.fit_loop.epoch_loop.batch_idx in self.bad:
            for name in self.parts:
                loss = loss + (self.model.get_parameter(name) * math.inf).sum().nan_to_num() * 0
        return loss

    def on_train_batch_end(self, *_):
        optimizer = self.trainer.optimizers[0]
        state = {(p, k): v.clone() for p, s in optimizer.state.items() for k, v in s.items() if torch.is_tensor(v)}
        self.history.append(({name: p.detach().clone() for name, p in self.named_parameters()}, state))


def assert_equal(ours, others):
    assert [key for key, value in others.items() if not torch.equal(ours[key], value)] == []


def fit(strategy, task=Poisoned, *, steps=5, **given):
    return run(strategy, lambda: task(TinyTransformer(dropout=0.0)), steps, seed=11, **given)


PRECISIONS = {
    "32-true": ("32-true", {}),
    "split": ("bf16-true", {}),
    "fp32 masters": ("bf16-true", {"master": "fp32"}),
    "torch": ("32-true", EXACT),
    "torch bf16": ("bf16-true", EXACT),
    "8bit": ("bf16-true", {"state": "8bit"}),
}


@pytest.mark.parametrize(("kind", "accumulate", "clip"), every_value(PRECISIONS, [1, 2], [None, 0.5]))
def test_a_step_is_left_out_and_nothing_changes(kind, accumulate, clip):
    precision, options = PRECISIONS[kind]
    arguments = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    # clipping by norm, unless it is left to the step, makes all gradients NaN: found out before
    with pytest.warns(
        lightning_cxl.LightningCXLWarning, match=r"`model\.blocks\.1\.out\.weight`.*this step is left out"
    ):
        module, trainer = fit(options, **arguments)
    before, after = module.history[1], module.history[3 if accumulate == 2 else 2]
    assert len(after[1]) > 60
    assert_equal(after[0], before[0])
    assert_equal(after[1], before[1])
    last = module.history[-1]
    assert all(p.isfinite().all() for p in last[0].values())
    assert not torch.equal(last[0]["model.head.weight"], after[0]["model.head.weight"]), "it trains on"
    if options is not EXACT:
        assert trainer.optimizers[0].grad_scale == 1.0


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_ignore_lets_them_through_as_plain_lightning_does(precision):
    with warnings.catch_warnings():
        warnings.simplefilter("error", lightning_cxl.LightningCXLWarning)
        warnings.simplefilter("ignore", lightning_cxl.MissingTierWarning)
        ours, _ = fit({"on_overflow": "ignore"}, precision=precision)
    plain, _ = fit("auto", precision=precision)
    assert ours.history[2][0]["model.head.weight"].isnan().all()
    for name, value in plain.history[2][0].items():
        assert torch.equal(ours.history[2][0][name].isnan(), value.isnan()), name


def edit(module, *_):
    """Write through ``.data``, which leaves no trace in version counters."""
    if module.trainer.fit_loop.epoch_loop.batch_idx == 2:
        module.model.head.weight.grad.data[0, 0] = math.nan


def edits_in(hook):
    def call(self, *args, **kwargs):
        getattr(super(cls, self), hook)(*args, **kwargs)
        edit(self)

    cls = type("Edits", (Poisoned,), {hook: call})
    return cls


class EditingCallback(Callback):
    def on_after_backward(self, trainer, pl_module):
        edit(pl_module)


PLACES = ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "backward", "callback"]


@pytest.mark.parametrize(("where", "precision"), every_value(PLACES, ["32-true", "bf16-true"]))
def test_edits_through_data_are_seen(where, precision):
    in_callback = where == "callback"
    task, callbacks = (Poisoned, [EditingCallback()]) if in_callback else (edits_in(where), [])
    with pytest.warns(lightning_cxl.LightningCXLWarning, match=r"gradient of `model\.head\.weight`"):
        module, _ = fit({}, lambda model: task(model, bad=()), callbacks=callbacks, precision=precision)
    assert torch.equal(module.history[2][0]["model.head.weight"], module.history[1][0]["model.head.weight"])


class OwnStep(torch.optim.SGD):
    """As third-party optimizers: evaluates the closure itself, after `before` has happened to the weights."""

    before = 0.0

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"] if self.before else ():
                p.add_(self.before)
        return super().step(closure)


class ChangesFirst(OwnStep):
    before = 1e-3


class OwnAdam(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def uses(make):
    class Uses(Poisoned):
        def configure_optimizers(self):
            return make(self.parameters())

    return Uses


OWNERS = {"own": OwnStep, "AdamW": OwnAdam, "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=1)}


@pytest.mark.parametrize(("name", "precision"), every_value(OWNERS, ["bf16-true", "32-true"]))
def test_an_optimizer_that_evaluates_its_closure_itself_is_guarded(name, precision):
    with pytest.warns(lightning_cxl.LightningCXLWarning, match="this step is left out"):
        module, _ = fit({}, uses(OWNERS[name]), precision=precision)
    assert_equal(module.history[2][0], module.history[1][0])
    last = module.history[-1][0]
    assert any(not torch.equal(last[key], value) for key, value in module.history[2][0].items()), "it trains on"
    assert all(value.isfinite().all() for value in last.values())
    with pytest.raises(GradientOverflowError, match=r"`model\.blocks\.1\.out\.weight`"):
        fit({"on_overflow": "error"}, uses(OWNERS[name]), precision=precision)


def test_a_step_that_has_changed_weights_already_ends_the_run():
    with pytest.raises(GradientOverflowError, match="in the middle of a step of ChangesFirst"):
        fit({}, uses(ChangesFirst))
    module, _ = fit({"on_overflow": "ignore"}, uses(ChangesFirst))
    assert module.history[2][0]["model.head.weight"].isnan().all()
