"""The main job: LightningCLI over `CausalLM` and `TextData`; short errors about options; what a run ends with."""

import difflib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from pickle import UnpicklingError
from typing import IO, Any

import datasets
import transformers
from torch.distributed.elastic.multiprocessing.errors import record

from lightning_cxl.commands.parsers import PROGRAM
from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.data import TextData
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.integrations import lightning
from lightning_cxl.weights.hf import require_model

_UNKNOWN = re.compile(r"unrecognized arguments: .*?--([\w.-]+)|does not accept option '([\w.-]+)'")


class Summary(lightning.Callback):
    """Shows first rows of `predict`, what is saved after Ctrl-C, and collects what `fit` shows at its end.

    The loss before training is that of Lightning's sanity check, if that covers the whole validation set
    (``num_sanity_val_steps=-1``); a resumed run has none.
    """

    def __init__(self, max_new_tokens: int = 64) -> None:
        self.max_new_tokens = max_new_tokens
        self.before, self.after, self.sample = "not measured", "not measured", ""

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if trainer.state.fn != "fit" or "val_loss" not in trainer.callback_metrics:
            return
        loss = f"{float(trainer.callback_metrics['val_loss']):.4f}"
        if not trainer.sanity_checking:
            self.after = f"{loss} (step {trainer.global_step})"
        elif trainer.num_sanity_val_batches == trainer.num_val_batches:
            self.before = loss

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        data: Any = getattr(trainer, "datamodule", None)
        with trainer.precision_plugin.forward_context():  # while the weights are where the strategy runs them
            tokens = pl_module.generate_tokens(data.held_out(1)[0][0], max_new_tokens=self.max_new_tokens)
        self.sample = data.tokenizer.decode(tokens, skip_special_tokens=True)

    def on_predict_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        if batch_idx == 0 and trainer.is_global_zero:
            for number, (ids, predicted) in enumerate(zip(batch["input_ids"][:3], outputs, strict=False), 1):
                print(f"row {number}, text:      {pl_module.tokenizer.decode(ids[1:49])!r}")
                print(f"row {number}, predicted: {pl_module.tokenizer.decode(predicted[:48])!r}")

    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and trainer.state.fn == "fit" and trainer.is_global_zero:
            callback = trainer.checkpoint_callback
            saved = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
            advice = f"saved: {saved}\ngo on from there: the same command with --ckpt_path {saved}"
            advice = advice if saved else "no checkpoint was saved yet: lower ModelCheckpoint's every_n_train_steps"
            print(f"\ninterrupted after step {trainer.global_step}\n{advice}", file=sys.stderr)


class ShortErrors(lightning.LightningArgumentParser):
    """A parser whose errors have a few lines, and the nearest name; ``--help`` shows all options."""

    def print_usage(self, file: IO[str] | None = None) -> None:
        pass

    def error(self, message: str, ex: Exception | None = None) -> Any:
        found, parser = _UNKNOWN.search(message), getattr(ex, "subcommand_parser", None) or self
        near = found and difflib.get_close_matches(f"--{found[1] or found[2]}", parser._option_string_actions, n=1)
        super().error(message[:1500] + "".join(f"\ndid you mean `{each}`?" for each in near or ()), ex)


class FinetuneCLI(lightning.LightningCLI):
    """``fit``, ``validate``, ``test`` and ``predict``; model and data agree on tokenizer and vocabulary."""

    def __init__(self) -> None:
        self.summary = Summary()
        super().__init__(
            CausalLM,
            TextData,
            parser_class=ShortErrors,
            seed_everything_default=42,
            trainer_defaults={"strategy": "cxl_offload", "num_sanity_val_steps": -1, "callbacks": [self.summary]},
            parser_kwargs={"prog": PROGRAM},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # CausalLM saves its own plain options
            # a job that SLURM puts back into its queue keeps its number, which names the folder of the logger
            save_config_kwargs={"overwrite": "SLURM_RESTART_COUNT" in os.environ},
        )

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("model.name_or_path", "data.tokenizer_name_or_path")
        parser.link_arguments("data.vocab_size", "model.vocab_size")

    def before_instantiate_classes(self) -> None:
        """Refuse wrong names before anything is read; fill in defaults."""
        config = self.config[self.subcommand]
        for name in ("accumulate_grad_batches", "val_check_interval", "check_val_every_n_epoch"):
            if config.trainer[name] == 0:
                raise ConfigError(f"trainer.{name} must be larger than 0")
        if config.model.name_or_path is not None:
            require_model(config.model.name_or_path, needs_weights=True)
            config.trainer.precision = config.trainer.precision or "bf16-true"
        elif not any(each.startswith(("--config", "-c", "--model")) for each in sys.argv):
            raise ConfigError(
                "a model is needed: a hub id or a folder, or a file with options. For example:\n"
                f"  {PROGRAM} {self.subcommand} --model.name_or_path Qwen/Qwen2.5-0.5B --data.text_files chats.jsonl\n"
                f"  {PROGRAM} {self.subcommand} --config examples/configs/finetune_stdlib.yaml"
            )
        if (config.trainer.max_epochs, config.trainer.max_steps, config.trainer.max_time) == (None, -1, None):
            config.trainer.max_epochs = 1
        if config.trainer.logger in (False, []):  # then a run has no folder of its own for its config.yaml
            self.save_config_callback = None

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ValueError, TypeError) as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if not frame.f_globals["__name__"].startswith("lightning"):  # of code of the user
                raise
            raise ConfigError(str(error)) from error

    def after_fit(self) -> None:
        """Show losses, a sample and memory; the memory report only under a strategy that has one."""
        if self.trainer.is_global_zero:
            print(f"\nvalidation loss: before {self.summary.before}, after {self.summary.after}\n")
            print(f"sample:\n{self.summary.sample}\n")
            if hasattr(self.trainer.strategy, "report"):
                print(self.trainer.strategy)


def main(arguments: Sequence[str]) -> None:
    """Run the command line of `sys.argv`, where LightningCLI finds its subcommand and `arguments`."""
    # raised by Lightning's own use of torch.utils._pytree (lightning 2.6 with torch 2.13): not for our user to act on
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec", category=FutureWarning)
    if not sys.stderr.isatty():  # a log, which bars fill
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    # torchrun repeats in its summary what `record` has noted of an error
    run = record(FinetuneCLI) if "TORCHELASTIC_ERROR_FILE" in os.environ else FinetuneCLI
    try:
        run()
    except (lightning.MisconfigurationException, UnpicklingError) as error:
        raise ConfigError(str(error)) from error
    except (FileNotFoundError, RuntimeError) as error:
        if not re.search("Checkpoint file not found|to NOT exist", str(error)):  # of code of the user
            raise
        raise ConfigError(str(error)) from error
