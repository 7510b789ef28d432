"""What a rank does in tests of state on SSD."""

from pathlib import Path
from typing import Any

from lightning_cxl.errors import LightningCXLError
from lightning_cxl.run.run import Run
from tests.distributed import lightning_runs, training
from tests.distributed.training import Job, Trained, place
from tests.storage_cases import damage


def by_us(job: Job) -> Trained:
    """Train with us, with inputs of units that are offloaded however small they are."""
    usual, Run.min_activation_bytes = Run.min_activation_bytes, 1
    try:
        return training.by_us(job)
    finally:
        Run.min_activation_bytes = usual


class SavesWhatIsDamaged(lightning_runs.Callback):
    """Saves a checkpoint after the drive of rank 1 was damaged, and keeps the error."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder, self.path = folder, path
        self.error: LightningCXLError | None = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Damage, and save."""
        _ = trainer.optimizers[0].state  # waits for the writes
        if place()[0] == 1:
            damage(self.folder / "rank-1")
        try:
            trainer.save_checkpoint(self.path)
        except LightningCXLError as error:
            self.error = error


def save_what_is_damaged(folder: Path, path: Path, options: dict[str, Any]) -> str:
    """Return the error with which a save ends on this rank."""
    callback = SavesWhatIsDamaged(folder, path)
    lightning_runs.fit(1, options=options, callback=callback)
    assert callback.error is not None
    return f"{type(callback.error).__name__}: {callback.error}"


def refusal(options: dict[str, Any]) -> str:
    """Return the error with which a run is refused."""
    try:
        lightning_runs.fit(1, options=options)
    except LightningCXLError as error:
        return f"{type(error).__name__}: {error}"
    return "none"
