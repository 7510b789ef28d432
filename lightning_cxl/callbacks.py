"""`OffloadProgressBar`: Lightning's Rich progress bar with host memory, and what the training waits for."""

import math
import sys
import time
from typing import Any

import psutil

from lightning_cxl import timing
from lightning_cxl.integrations.lightning import LightningModule, RichProgressBar, Trainer


class OffloadProgressBar(RichProgressBar):
    """Lightning's Rich bar plus `host_GiB`, the resident memory of this process, and `waits_for`.

    `waits_for` names what the training waits for longest (`update`, `gradients` or `ssd`), and for which part of the
    last second or longer, where that is at least 5 %.

    It shows whatever the module logs with ``prog_bar=True``. Where the output is not a terminal (a file, a CI log)
    it prints one plain line every `plain_every_n_steps` optimizer steps instead.
    """

    def __init__(self, plain_every_n_steps: int = 10, **kwargs: Any) -> None:
        """Choose how often plain lines appear; the first step of a run prints one, too.

        Args:
            plain_every_n_steps: Optimizer steps between plain lines.
            **kwargs: Of Lightning's RichProgressBar.
        """
        super().__init__(**kwargs)
        if plain_every_n_steps < 1:
            raise ValueError(f"plain_every_n_steps must be at least 1, got {plain_every_n_steps}")
        self.plain_every_n_steps = plain_every_n_steps
        self._plain, self._printed_step = False, 0
        self._waits, self._shown = "", (dict[str, float](), time.perf_counter())

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._printed_step = 0
        self._shown = timing.totals(), time.perf_counter()
        if self.is_enabled and not sys.stdout.isatty():
            self.disable()
            self._plain = True

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return Lightning's metrics and `host_GiB`, without the logger's version number."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        metrics["host_GiB"] = psutil.Process().memory_info().rss / 2**30
        now, before, since = time.perf_counter(), *self._shown
        if now - since > 1.0:  # stalls of fewer steps are chance
            waited = {name: seconds for name, seconds in timing.totals().items() if name.startswith("stall_")}
            self._shown = waited, now
            parts = {name: (each - before.get(name, 0.0)) / (now - since) for name, each in waited.items()}
            longest = max(parts, key=lambda name: parts[name], default="")
            named = longest.removeprefix("stall_").removesuffix("_s")
            self._waits = f"{named} {parts[longest]:.0%}" if parts.get(longest, 0.0) >= 0.05 else ""
        return {**metrics, "waits_for": self._waits} if self._waits else metrics

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
