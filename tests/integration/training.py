"""What the integration tests share: quiet Trainers and one seeded run."""

from lightning.pytorch import Trainer, seed_everything

import lightning_cxl
from tests.models import Task, token_data

EXACT = {"cpu_adam": False}  # the user's own torch optimizer on the host: bit-identical to plain Lightning


def make_trainer(strategy="auto", **kwargs):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", devices=1, strategy=strategy, **{**quiet, "max_epochs": -1, **kwargs})


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
    return module.losses, {name: value.clone() for name, value in module.state_dict().items()}
