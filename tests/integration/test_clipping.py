"""Clipping under the Trainer: left to CPUAdam's step where nobody looks at gradients in between, else done at once."""

import math

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision, Precision

from tests.cases import every_value
from tests.integration.training import run
from tests.models import Task, TinyTransformer

pytestmark = pytest.mark.on_cpu

CLIP = 0.3  # every step of these runs has a larger norm


class Recording(Task):
    """Remembers how gradients were clipped, and their norm after the step."""

    def on_train_batch_start(self, batch, batch_idx):
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        if grads and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.norm_after, self.largest = norm(grads), max(float(grad.abs().max()) for grad in grads)

    @property
    def deferred(self):
        return self.norm_after > 1.1 * CLIP


def norm(grads):
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads if g is not None))


def fit(strategy="cxl_offload", task=Recording, *, steps=8, **given):
    given = {"gradient_clip_val": CLIP, **given}
    module, trainer = run(strategy, lambda: task(TinyTransformer(dropout=0.0)), steps, seed=11, **given)
    assert "clip_grad_by_norm" not in vars(trainer.precision_plugin), "nothing stays"
    return module, trainer


def test_the_step_clips_as_plain_lightning_does():
    ours, trainer = fit()
    plain, _ = fit("auto")
    assert ours.deferred and not plain.deferred
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert ours.losses != pytest.approx(fit(gradient_clip_val=None)[0].losses, rel=1e-5), "clipping matters here"
    assert ours.norm_after > 2 * CLIP and plain.norm_after == pytest.approx(CLIP, rel=1e-4)
    assert trainer.optimizers[0].grad_scale == 1.0


def looks(self, optimizer, *_):
    self.seen = norm(p.grad for group in optimizer.param_groups for p in group["params"])


class StepHook(Recording):
    def configure_optimizers(self):
        made = super().configure_optimizers()
        made["optimizer"].register_step_pre_hook(lambda optimizer, *_: looks(self, optimizer))
        return made


class OnTheObject(Recording):
    def __init__(self, model):
        super().__init__(model)
        self.on_before_optimizer_step = lambda optimizer: None


class Configured(Recording):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        looks(self, optimizer)


def with_hook(name, base=Recording):
    return type("Hooked", (base,), {name: lambda *_: None})


BeforeStep = with_hook("on_before_optimizer_step")
LOOKS = {
    "on_before_optimizer_step": (BeforeStep, []),
    "on_before_zero_grad": (with_hook("on_before_zero_grad"), []),
    "on_train_batch_end": (with_hook("on_train_batch_end"), []),
    "configure_gradient_clipping": (Configured, []),
    "step pre-hook": (StepHook, []),
    "on the object": (OnTheObject, []),
    "callback": (Recording, [with_hook("on_before_optimizer_step", Callback)()]),
    "LambdaCallback": (Recording, [LambdaCallback(on_before_optimizer_step=lambda *_: None)]),
}


@pytest.mark.parametrize("who", LOOKS)
def test_whoever_may_look_finds_clipped_gradients(who):
    task, callbacks = LOOKS[who]
    module, _ = fit(task=task, callbacks=callbacks)
    assert not module.deferred
    assert module.norm_after == pytest.approx(CLIP, rel=1e-4)
    assert getattr(module, "seen", CLIP) == pytest.approx(CLIP, rel=1e-4)
    assert module.losses == pytest.approx(fit("auto")[0].losses, rel=1e-6)


def test_lightnings_own_callbacks_do_not_look(tmp_path):
    callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=3)]
    assert fit(callbacks=callbacks, enable_checkpointing=True)[0].deferred


@pytest.mark.parametrize("name", ["clip_grad_by_norm", "clip_gradients", "main_params"])
def test_a_plugins_own_clipping_is_used(name):
    calls = []

    def method(self, optimizer, *args):
        calls.append(name)
        return getattr(Precision, name)(self, optimizer, *args)

    plugin = type("Own", (Precision,), {name: method})()
    module, _ = fit(plugins=[plugin])
    assert len(calls) == 8 and module.norm_after == pytest.approx(CLIP, rel=1e-4)


@pytest.mark.parametrize("how", ["class", "LambdaCallback", "late hook"])
def test_edits_through_data_are_in_the_norm(how):
    """A norm of before the edit would scale the gradients down once more; Adam's large eps makes that matter."""

    def shrink(trainer, module):
        for p in module.parameters():
            if p.grad is not None:
                p.grad.data.mul_(1e-3)

    class Edits(Callback):
        on_after_backward = staticmethod(shrink)

    class Late(Recording):
        def on_train_start(self):
            for p in self.parameters():
                p.register_post_accumulate_grad_hook(self.hook)

        @staticmethod
        def hook(p):
            p.grad.data.mul_(1e-3)

    callbacks = {"class": [Edits()], "LambdaCallback": [LambdaCallback(on_after_backward=shrink)]}.get(how, [])
    task = Late if how == "late hook" else Recording
    ours, plain = (
        fit(strategy, lambda m: task(m, eps=1.0, lr=1.0), callbacks=callbacks)[0].losses
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
        module, _ = fit(strategy, task, steps=20, **arguments)
        assert "_unscale_grads_" not in vars(scaler), "nothing stays"
        return module.losses, scaler.get_scale()

    (ours, scale), (plain, plain_scale) = scaled("cxl_offload"), scaled("auto")
    assert scale == plain_scale
    assert ours == pytest.approx(plain, rel=1e-3)
    assert abs(plain[-1] - plain[0]) > 0.01 and all(map(math.isfinite, ours))
