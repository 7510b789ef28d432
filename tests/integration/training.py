"""What the integration tests share: quiet Trainers on the device under test, and one seeded run."""

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

import lightning_cxl
from tests import training_device
from tests.models import Task, token_data

EXACT = {"cpu_adam": False}  # the user's own torch optimizer on the host: bit-identical to plain Lightning


def make_trainer(strategy="auto", *, precision=None, plugins=(), **kwargs):
    """Return a Trainer for the device under test; ``"auto"`` is plain Lightning there."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": -1,
        "devices": 1,
    }
    device = training_device.current
    if device.type == "apart":  # which Lightning takes for a kind of CPU with CUDA's autocast
        if strategy == "auto":
            strategy = SingleDeviceStrategy(device)
        if precision in ("16-mixed", "bf16-mixed"):
            plugins, precision = [*plugins, MixedPrecision(precision, device.type)], None
    return Trainer(
        accelerator=training_device.accelerator(), strategy=strategy, precision=precision,
        plugins=list(plugins), **{**quiet, **kwargs},
    )  # fmt: skip


def offload(**options):
    return lightning_cxl.CXLOffloadStrategy(**options)


def train(
    make_model,
    strategy,
    *,
    data=token_data,
    steps=20,
    task=Task,
    optimizer="adamw",
    optimizer_args=None,
    trainer_args=None,
):
    """Train from a fixed seed; returns (losses, state dict)."""
    seed_everything(11, verbose=False)
    module = task(make_model(), optimizer, **(optimizer_args or {}))
    trainer = make_trainer(strategy, max_steps=steps, **(trainer_args or {}))
    trainer.fit(module, data())
    return module.losses, {name: value.cpu().clone() for name, value in module.state_dict().items()}
