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
        state = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
        self.history.append(({name: p.detach().clone() for name, p in self.named_parameters()}, state))


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
    assert len(after[1]) > 30
    for name, value in before[0].items():
        assert torch.equal(after[0][name], value), name
    for parameter, state in before[1].items():
        for key, value in state.items():
            assert torch.equal(after[1][parameter][key], value), key
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


class Edits(Poisoned):
    """Writes through ``.data``, which leaves no trace in version counters."""

    where = "on_after_backward"
    value = math.nan

    def edit(self):
        if self.trainer.fit_loop.epoch_loop.batch_idx == 2:
            self.model.head.weight.grad.data[0, 0] = self.value


def _edits_in(hook):
    def call(self, *args, **kwargs):
        result = getattr(super(cls, self), hook)(*args, **kwargs)
        self.edit()
        return result

    cls = type("Edits", (Edits,), {hook: call})
    return lambda model: cls(model, bad=())


class EditingCallback(Callback):
    def on_after_backward(self, trainer, pl_module):
        pl_module.edit()


PLACES = ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "backward", "callback"]


@pytest.mark.parametrize(("where", "precision"), every_value(PLACES, ["32-true", "bf16-true"]))
def test_edits_through_data_are_seen(where, precision):
    task = (lambda m: Edits(m, bad=())) if where == "callback" else _edits_in(where)
    callbacks = [EditingCallback()] if where == "callback" else []
    with pytest.warns(lightning_cxl.LightningCXLWarning, match=r"gradient of `model\.head\.weight`"):
        module, _ = fit({}, task, callbacks=callbacks, precision=precision)
    assert torch.equal(module.history[2][0]["model.head.weight"], module.history[1][0]["model.head.weight"])


def test_manual_optimization_is_guarded():
    class Manual(Poisoned):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    with pytest.warns(lightning_cxl.LightningCXLWarning, match="this step is left out"):
        module, _ = fit({}, Manual)
    assert torch.equal(module.history[2][0]["model.head.weight"], module.history[1][0]["model.head.weight"])
    assert not torch.equal(module.history[3][0]["model.head.weight"], module.history[2][0]["model.head.weight"])


class OwnStep(torch.optim.Optimizer):
    """As third-party optimizers: evaluates the closure itself, after `before` has happened to the weights."""

    before = 0.0

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.params():
            p.add_(self.before) if self.before else None
        with torch.enable_grad():
            loss = closure()
        for p in self.params():
            p.add_(p.grad, alpha=-1e-2) if p.grad is not None else None
        return loss

    def params(self):
        return [p for group in self.param_groups for p in group["params"]]


class ChangesFirst(OwnStep):
    before = 1e-3


class OwnAdam(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def uses(make):
    class Uses(Poisoned):
        def configure_optimizers(self):
            return make(self.parameters())

        def on_train_batch_end(self, *_):
            self.history.append(({name: p.detach().clone() for name, p in self.named_parameters()}, {}))

    return Uses


OWNERS = {"own": OwnStep, "AdamW": OwnAdam, "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=1)}


@pytest.mark.parametrize(("name", "precision"), every_value(OWNERS, ["bf16-true", "32-true"]))
def test_an_optimizer_that_evaluates_its_closure_itself_is_guarded(name, precision):
    with pytest.warns(lightning_cxl.LightningCXLWarning, match="this step is left out"):
        module, _ = fit({}, uses(OWNERS[name]), precision=precision)
    for key, value in module.history[1][0].items():
        assert torch.equal(module.history[2][0][key], value), key
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
