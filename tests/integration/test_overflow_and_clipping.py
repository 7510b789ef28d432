"""Gradients under the Trainer: infinite or not a number, and clipped by the step or at once."""

import math

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import MixedPrecision

import lightning_cxl
from lightning_cxl import GradientOverflowError
from tests.cases import every_value
from tests.integration.training import EXACT, assert_equal, run
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
    with pytest.warns(lightning_cxl.LightningCXLWarning, match=r"`model\.blocks\.1\.out\.weight`.*step is left out"):
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


def edits_in(hook):
    """A task that writes through ``.data``, which leaves no trace in version counters."""

    def call(self, *args, **kwargs):
        getattr(super(cls, self), hook)(*args, **kwargs)
        if self.trainer.fit_loop.epoch_loop.batch_idx == 2:
            self.model.head.weight.grad.data[0, 0] = math.nan

    cls = type("Edits", (Poisoned,), {hook: call})
    return lambda model: cls(model, bad=())


HOOKS = ["on_after_backward", "configure_gradient_clipping", "backward"]


@pytest.mark.parametrize(("hook", "precision"), every_value(HOOKS, ["32-true", "bf16-true"]))
def test_edits_through_data_are_seen(hook, precision):
    with pytest.warns(lightning_cxl.LightningCXLWarning, match=r"gradient of `model\.head\.weight`"):
        module, _ = fit({}, edits_in(hook), precision=precision)
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
    def configure(self):
        return make(self.parameters())

    return type("Uses", (Poisoned,), {"configure_optimizers": configure})


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


# -- clipping: left to CPUAdam's step where nobody looks at gradients in between, else done at once --------------------

CLIP = 0.3  # every step of these runs has a larger norm


class Recording(Task):
    def on_train_batch_start(self, batch, batch_idx):
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if grads and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.norm_after = norm(grads)

    @property
    def deferred(self):
        return self.norm_after > 1.1 * CLIP


def norm(grads):
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads if g is not None))


def fit_clipped(strategy="cxl_offload", task=Recording, *, steps=8, **given):
    module, trainer = fit(strategy, task, steps=steps, **{"gradient_clip_val": CLIP, **given})
    assert "clip_grad_by_norm" not in vars(trainer.precision_plugin), "nothing stays"
    return module, trainer


def test_the_step_clips_as_plain_lightning_does():
    ours, trainer = fit_clipped()
    plain, _ = fit_clipped("auto")
    assert ours.deferred and not plain.deferred
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert ours.losses != pytest.approx(fit_clipped(gradient_clip_val=None)[0].losses, rel=1e-5), "it matters"
    assert ours.norm_after > 2 * CLIP and plain.norm_after == pytest.approx(CLIP, rel=1e-4)
    assert trainer.optimizers[0].grad_scale == 1.0


def with_hook(name, base=Recording, call=lambda *_: None):
    return type("Hooked", (base,), {name: call})


def with_step_hook(self):
    made = Task.configure_optimizers(self)
    made["optimizer"].register_step_pre_hook(lambda *_: None)
    return made


BeforeStep = with_hook("on_before_optimizer_step")
LOOKS = {
    "on_before_optimizer_step": (BeforeStep, []),
    "on_train_batch_end": (with_hook("on_train_batch_end"), []),
    "clips": (
        with_hook(
            "configure_gradient_clipping", call=lambda self, *given, **named: self.clip_gradients(*given, **named)
        ),
        [],
    ),
    "step pre-hook": (with_hook("configure_optimizers", call=with_step_hook), []),
    "callback": (Recording, [with_hook("on_before_optimizer_step", Callback)()]),
}


@pytest.mark.parametrize("who", LOOKS)
def test_whoever_may_look_finds_clipped_gradients(who):
    task, callbacks = LOOKS[who]
    module, _ = fit_clipped(task=task, callbacks=callbacks)
    assert not module.deferred
    assert module.norm_after == pytest.approx(CLIP, rel=1e-4)
    assert module.losses == pytest.approx(fit_clipped("auto")[0].losses, rel=1e-6)


@pytest.mark.parametrize("how", ["callback", "late hook"])
def test_edits_through_data_are_in_the_norm(how):
    """A norm of before the edit would scale the gradients down once more; Adam's large eps makes that matter."""

    def edit(p):
        if p.grad is not None:
            p.grad.data.mul_(1e-3)

    def shrink(trainer, module):
        for p in module.parameters():
            edit(p)

    def hook_late(trainer, module):
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(edit)

    callback = LambdaCallback(
        **{"late hook": {"on_train_start": hook_late}, "callback": {"on_after_backward": shrink}}[how]
    )
    ours, plain = (
        fit_clipped(strategy, lambda m: Recording(m, eps=1.0, lr=1.0), callbacks=[callback])[0].losses
        for strategy in ("cxl_offload", "auto")
    )
    assert ours == pytest.approx(plain, rel=1e-5) and abs(plain[-1] - plain[0]) > 1e-4


@pytest.mark.parametrize(("algorithm", "task"), every_value(["norm", "value", None], [Recording, BeforeStep]))
@pytest.mark.filterwarnings("ignore:.*this step is left out")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_clipping_under_a_loss_scaler_that_overflows(task, algorithm):
    """Steps that the scaler leaves out change nothing of those that follow."""

    def scaled(strategy):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        value = {"norm": CLIP, "value": 0.003, None: None}[algorithm]
        arguments = {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm, "plugins": [plugin]}
        module, _ = fit_clipped(strategy, task, steps=20, **arguments)
        assert "_unscale_grads_" not in vars(scaler), "nothing stays"
        return module.losses, scaler.get_scale()

    (ours, scale), (plain, plain_scale) = scaled("cxl_offload"), scaled("auto")
    assert scale == plain_scale
    assert ours == pytest.approx(plain, rel=1e-3)
    assert abs(plain[-1] - plain[0]) > 0.01 and all(map(math.isfinite, ours))
