"""What the integration tests share: quiet Trainers on the device under test, and one seeded run."""

import torch
from lightning.fabric import Fabric, plugins, strategies
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

import lightning_cxl
from tests import training_device
from tests.models import Task, TinyTransformer, token_data

EXACT = {"cpu_adam": False}  # the user's own torch optimizer on the host: bit-identical to plain Lightning


def make_trainer(strategy="auto", *, precision=None, plugins=(), **kwargs):
    """Return a Trainer for the device under test; ``"auto"`` is plain Lightning, a dict has options of ours."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": -1,
        "devices": 1,
    }
    device = training_device.current
    if strategy == "auto" and device.type == "apart":  # Lightning does not know it
        strategy = SingleDeviceStrategy(device)
    elif isinstance(strategy, dict):
        strategy = offload(**strategy)
    if device.type == "apart" and precision in ("16-mixed", "bf16-mixed"):  # Lightning takes it for a kind of CPU
        plugins, precision = [*plugins, MixedPrecision(precision, device.type)], None
    return Trainer(
        accelerator=training_device.accelerator(), strategy=strategy, precision=precision,
        plugins=list(plugins), **{**quiet, **kwargs},
    )  # fmt: skip


def make_fabric(strategy="auto", precision=None):
    """Return a Fabric for the device under test."""
    device, mixed = training_device.current, []
    if device.type == "apart":
        strategy = strategies.SingleDeviceStrategy(device) if strategy == "auto" else strategy
        if precision in ("bf16-mixed", "16-mixed"):
            mixed, precision = [plugins.MixedPrecision(precision, device.type)], None
    given = {"strategy": strategy, "precision": precision, "plugins": mixed}
    fabric = Fabric(accelerator=training_device.accelerator(), devices=1, **given)
    fabric.launch()
    return fabric


def offload(**options):
    return lightning_cxl.CXLOffloadStrategy(**options)


def run(strategy, task, steps, *, data=None, validation=None, seed=5, ckpt_path=None, save=None, **given):
    """Train a module, or what makes one, from a fixed seed; returns it and its Trainer. `save` is a path."""
    seed_everything(seed, verbose=False)
    module = task if isinstance(task, LightningModule) else task()
    trainer = make_trainer(strategy, max_steps=steps, **given)
    data = token_data() if data is None else data
    trainer.fit(module, data, validation, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    if save:
        trainer.save_checkpoint(save)
    return module, trainer


def fit(
    strategy, make_model=lambda: TinyTransformer(dropout=0.0), *, task=Task, optimizer="adamw", optimizer_args=None,
    steps=4, **given,
):  # fmt: skip
    """As `run`, with a task of a model; returns the module and its weights."""
    module, _ = run(strategy, lambda: task(make_model(), optimizer, **(optimizer_args or {})), steps, **given)
    return module, weights_of(module)


def weights_of(module):
    return {name: value.cpu().clone() for name, value in module.state_dict().items()}


def train(make_model, strategy, *, data=token_data, steps=20, trainer_args=None, **given):
    """As `fit`; returns (losses, state dict)."""
    module, state = fit(strategy, make_model, steps=steps, data=data(), seed=11, **given, **(trainer_args or {}))
    return module.losses, state


def assert_equal(ours, other):
    """Tensors, or those in lists and dicts, are equal, bit for bit."""
    torch.testing.assert_close(ours, other, rtol=0, atol=0)


def assert_same(one, other):
    """Two results of `fit` are equal, bit for bit."""
    assert_identical((other[0].losses, other[1]), (one[0].losses, one[1]))


def assert_identical(plain, ours):
    assert len(set(plain[0])) > 1, "it trains"
    assert plain[0] == ours[0]
    assert_equal(ours[1], plain[1])


def assert_same_weights(ours, other):
    """Two modules have the same weights, bit for bit."""
    assert_equal(ours.state_dict(), other.state_dict())
