"""`OffloadProgressBar`: Lightning's Rich progress bar with the host memory of this process."""

import math
import sys
from typing import Any

import psutil

from lightning_cxl.integrations.lightning.lightning_api import LightningModule, RichProgressBar, Trainer


class OffloadProgressBar(RichProgressBar):
    """Lightning's Rich bar plus `host_GiB`, the resident memory of this process.

    It shows whatever the module logs with ``prog_bar=True``. Where the output is not a terminal (a file, a CI log)
    it prints one plain line every `plain_every_n_steps` optimizer steps instead.
    """

    def __init__(self, plain_every_n_steps: int = 10, **kwargs: Any) -> None:
        """Choose how often plain lines appear.

        Args:
            plain_every_n_steps: Optimizer steps between plain lines; the first step of a run prints one too.
            **kwargs: Of Lightning's RichProgressBar.

        Raises:
            ValueError: `plain_every_n_steps` is below 1.
        """
        super().__init__(**kwargs)
        if plain_every_n_steps < 1:
            raise ValueError(f"plain_every_n_steps must be at least 1, got {plain_every_n_steps}")
        self.plain_every_n_steps = plain_every_n_steps
        self._plain = False
        self._printed_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._printed_step = 0
        if self.is_enabled and not sys.stdout.isatty():
            self.disable()
            self._plain = True

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return Lightning's metrics and `host_GiB`, without the logger's version number."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {**metrics, "host_GiB": psutil.Process().memory_info().rss / 2**30}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        step = trainer.global_step
        is_due = self._printed_step == 0 or step % self.plain_every_n_steps == 0
        if self._plain and step != self._printed_step and is_due:
            self._printed_step = step
            self._print_line(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self._plain and not trainer.sanity_checking:
            self._print_line(trainer, pl_module)

    def _print_line(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = self.get_metrics(trainer, pl_module)
        shown = (f"{name} {_number(value)}" for name, value in metrics.items())
        of_how_many = ""
        if trainer.state.fn == "fit":
            last = trainer.estimated_stepping_batches
            of_how_many = "/?" if math.isinf(last) else f"/{last}"  # at times only the end of the data tells
        print(f"step {trainer.global_step}{of_how_many}  " + "  ".join(shown), flush=True)


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
