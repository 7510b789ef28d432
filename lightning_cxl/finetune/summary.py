"""What a run ends with: losses, a sample and the memory report; predictions; what is saved where it was interrupted."""

import resource
import shlex
import sys
from typing import Any

from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.data import TextData
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.integrations.lightning.lightning_api import Callback, LightningModule, Trainer
from lightning_cxl.units import format_bytes

_SHOWN_ROWS, _SHOWN_TOKENS = 3, 48


class FitSummary(Callback):
    """Collects the summary of a `CausalLM` run; `describe` shows it.

    The loss before training is the one of Lightning's sanity check, when that covers the whole validation set
    (``num_sanity_val_steps=-1``); a resumed run shows the one of its first start.
    """

    def __init__(self, prompt: str | None = None, max_new_tokens: int = 64) -> None:
        """Choose the sample.

        Args:
            prompt: What the sample continues. None: a held-out sample of the user's files, or ``"def "`` after training
                on Python.
            max_new_tokens: Longest continuation.
        """
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.loss_before: float | None = None
        self.loss_after: float | None = None
        self.loss_after_step = 0
        self.sample = ""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the loss of untrained weights."""
        if trainer.num_sanity_val_batches == trainer.num_val_batches:
            self.loss_before = _val_loss(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the newest loss."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.loss_after, self.loss_after_step = _val_loss(trainer), trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate the sample while the weights are where the strategy runs them.

        Raises:
            ConfigError: the module is not a `CausalLM`.
        """
        if not isinstance(pl_module, CausalLM):
            raise ConfigError(f"FitSummary is for a CausalLM, not a {type(pl_module).__name__}: remove the callback")
        data = getattr(trainer, "datamodule", None)
        with trainer.precision_plugin.forward_context():
            if self.prompt is None and isinstance(data, TextData) and data.text_files is not None:
                tokens = pl_module.generate_tokens(data.held_out(1)[0].prompt, max_new_tokens=self.max_new_tokens)
                assert data.tokenizer is not None  # since its setup
                self.sample = data.tokenizer.decode(tokens, skip_special_tokens=True)
            else:
                prompt = "def " if self.prompt is None else self.prompt
                self.sample = pl_module.generate_text(prompt, max_new_tokens=self.max_new_tokens)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Print the first rows as they are, and what the model takes for most likely behind each of their tokens."""
        tokenizer = getattr(pl_module, "tokenizer", None)
        if tokenizer is None or batch_idx > 0 or not trainer.is_global_zero:
            return
        for number, (ids, predicted) in enumerate(zip(batch["input_ids"], outputs, strict=True), 1):
            if number > _SHOWN_ROWS:
                break
            shown = slice(1, _SHOWN_TOKENS + 1), slice(0, _SHOWN_TOKENS)
            print(f"row {number}, text:      {tokenizer.decode(ids[shown[0]])!r}")
            print(f"row {number}, predicted: {tokenizer.decode(predicted[shown[1]])!r}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say after Ctrl-C what is saved, and how to go on."""
        if not isinstance(exception, KeyboardInterrupt) or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        callback = trainer.checkpoint_callback
        saved = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
        print(f"\ninterrupted after step {trainer.global_step}", file=sys.stderr)
        if saved:
            arguments = [each for each in sys.argv[1:] if not each.startswith("--ckpt_path=")]
            if "--ckpt_path" in arguments:
                place = arguments.index("--ckpt_path")
                del arguments[place : place + 2]
            again = shlex.join(["python", "-m", "lightning_cxl", *arguments, "--ckpt_path", saved])
            print(f"saved: {saved}\ngo on from there: {again}", file=sys.stderr)
        else:
            print("no checkpoint was saved yet: lower ModelCheckpoint's every_n_train_steps", file=sys.stderr)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run cannot measure again."""
        return {"loss_before": self.loss_before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the first start's loss."""
        self.loss_before = state_dict["loss_before"]

    def describe(self, trainer: Trainer) -> str:
        """Return everything as text; the memory report only under a strategy that has one."""
        before = "not measured" if self.loss_before is None else f"{self.loss_before:.4f}"
        after = "not measured" if self.loss_after is None else f"{self.loss_after:.4f} (step {self.loss_after_step})"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        parts = [
            f"validation loss: before {before}, after {after}",
            f"sample:\n{self.sample}",
            *([str(trainer.strategy)] if hasattr(trainer.strategy, "report") else []),
            f"peak host memory of this process: {format_bytes(peak)}",
        ]
        return "\n\n".join(parts)


def _val_loss(trainer: Trainer) -> float | None:
    loss = trainer.callback_metrics.get("val_loss")
    return None if loss is None else float(loss)
