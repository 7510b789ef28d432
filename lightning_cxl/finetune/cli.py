"""The main job: LightningCLI over `CausalLM` and `TextData`; short errors about options; what a run ends with."""

import contextlib
import difflib
import logging
import os
import pickle
import re
import resource
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import datasets
import transformers
from torch.distributed.elastic.multiprocessing.errors import record

from lightning_cxl.commands.parsers import COMMANDS, PROGRAM
from lightning_cxl.errors import ConfigError, LightningCXLError
from lightning_cxl.finetune.data import TextData
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.integrations.lightning.lightning_api import (
    Callback,
    LightningArgumentParser,
    LightningCLI,
    LightningModule,
    MisconfigurationException,
    StrategyRegistry,
    Trainer,
)
from lightning_cxl.text import format_bytes
from lightning_cxl.weights.hf import require_model

_EXAMPLE = "--config examples/configs/finetune_stdlib.yaml"
_NO_MODEL = """a model is needed: a hub id or a folder, or a file with options. For example:
  {program} --model.name_or_path Qwen/Qwen2.5-0.5B --data.text_files chats.jsonl
  {program} {example}"""
_UNKNOWN = re.compile(r"unrecognized arguments: .*?--([\w.-]+)|does not accept option '([\w.-]+)'")
_MOST_LINES, _MOST_WIDTH = 12, 240


class FitSummary(Callback):
    """Collects what a run of `CausalLM` ends with; `describe` shows it.

    The loss before training is the one of Lightning's sanity check, when that covers the whole validation set
    (``num_sanity_val_steps=-1``); a resumed run shows the one of its first start.
    """

    def __init__(self, prompt: None = None, max_new_tokens: int = 64) -> None:
        if prompt is not None:
            raise ConfigError(
                "FitSummary(prompt=...): this option was removed. The sample at the end of a run continues held-out "
                "text; for a prompt of your own use module.generate_tokens(tokens)"
            )
        self.max_new_tokens = max_new_tokens
        self.before: float | None = None
        self.after, self.sample = "not measured", ""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.num_sanity_val_batches == trainer.num_val_batches and "val_loss" in trainer.callback_metrics:
            self.before = float(trainer.callback_metrics["val_loss"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and "val_loss" in trainer.callback_metrics:
            self.after = f"{float(trainer.callback_metrics['val_loss']):.4f} (step {trainer.global_step})"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, CausalLM):
            raise ConfigError(f"FitSummary is for a CausalLM, not a {type(pl_module).__name__}: remove the callback")
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, TextData) and data.tokenizer is not None:
            with trainer.precision_plugin.forward_context():  # while the weights are where the strategy runs them
                tokens = pl_module.generate_tokens(data.held_out(1)[0][0], max_new_tokens=self.max_new_tokens)
            self.sample = data.tokenizer.decode(tokens, skip_special_tokens=True)

    def on_predict_batch_end(  # type: ignore[no-untyped-def]  # the Trainer's arguments
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ) -> None:
        tokenizer = getattr(pl_module, "tokenizer", None)
        if tokenizer is not None and batch_idx == 0 and trainer.is_global_zero:
            for number, (ids, predicted) in enumerate(zip(batch["input_ids"][:3], outputs, strict=False), 1):
                print(f"row {number}, text:      {tokenizer.decode(ids[1:49])!r}")
                print(f"row {number}, predicted: {tokenizer.decode(predicted[:48])!r}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, KeyboardInterrupt) or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        callback = trainer.checkpoint_callback
        saved = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
        print(f"\ninterrupted after step {trainer.global_step}", file=sys.stderr)
        if saved:
            arguments = re.sub(r"(^|\0)--ckpt_path[=\0][^\0]*", "", "\0".join(sys.argv[1:])).split("\0")
            again = shlex.join(["python", "-m", "lightning_cxl", *arguments, "--ckpt_path", saved])
            print(f"saved: {saved}\ngo on from there: {again}", file=sys.stderr)
        else:
            print("no checkpoint was saved yet: lower ModelCheckpoint's every_n_train_steps", file=sys.stderr)

    def state_dict(self) -> dict[str, Any]:
        return {"loss_before": self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict["loss_before"]

    def describe(self, trainer: Trainer) -> str:
        """Return everything as text; the memory report only under a strategy that has one."""
        before = "not measured" if self.before is None else f"{self.before:.4f}"
        peak = format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        report = [str(trainer.strategy)] if hasattr(trainer.strategy, "report") else []
        losses, sample = f"validation loss: before {before}, after {self.after}", f"sample:\n{self.sample}"
        return "\n\n".join([losses, sample, *report, f"peak host memory of this process: {peak}"])


class ShortErrors(LightningArgumentParser):
    """A parser whose errors have a few lines, and the nearest option; ``--help`` shows all options."""

    def print_usage(self, file: Any = None) -> None:
        pass

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        options = (getattr(ex, "subcommand_parser", None) or self)._option_string_actions
        lines = [line if len(line) <= _MOST_WIDTH else f"{line[:_MOST_WIDTH]} ..." for line in message.splitlines()]
        shown = [*lines[:_MOST_LINES], *(["..."] if len(lines) > _MOST_LINES else [])]
        if found := _UNKNOWN.search(message):
            near = difflib.get_close_matches(f"--{found[1] or found[2]}", options, n=1)
            shown += [f"did you mean `{each}`?" for each in near]
        if 'Parser key "model"' in message and "Unable to load config" in message:
            shown.append("`--model` takes a file with options: write `--model.name_or_path` for a folder or a hub id")
        super().error("\n".join(shown), ex)
        raise AssertionError("the parser goes on after an error")


@contextlib.contextmanager
def option_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, which options cause, into `ConfigError`; all others keep their traceback."""
    try:
        yield
    except LightningCXLError:
        raise
    except kinds as error:
        raise ConfigError(str(error).strip() or type(error).__name__) from error


class FinetuneCLI(LightningCLI):
    """``fit``, ``validate``, ``test`` and ``predict``; model and data agree on tokenizer and vocabulary."""

    def __init__(self) -> None:
        self.summary = FitSummary()
        helps = {name: f"{COMMANDS[name].does}; example: {PROGRAM} {name} {_EXAMPLE}" for name in self.subcommands()}
        super().__init__(
            CausalLM,
            TextData,
            parser_class=ShortErrors,
            seed_everything_default=42,
            trainer_defaults={"strategy": "cxl_offload", "num_sanity_val_steps": -1, "callbacks": [self.summary]},
            parser_kwargs={"prog": PROGRAM, **{name: {"description": text} for name, text in helps.items()}},
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # CausalLM saves its own plain options
            # a job that SLURM puts back into its queue keeps its number, which names the folder of the logger
            save_config_kwargs={"overwrite": "SLURM_RESTART_COUNT" in os.environ},
        )

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("model.name_or_path", "data.tokenizer_name_or_path")
        parser.link_arguments("data.vocab_size", "model.vocab_size")

    def before_instantiate_classes(self) -> None:
        """Refuse what Lightning would fail on later, and wrong names, before anything is read; fill in defaults."""
        config = self.config[self.subcommand]
        for name in ("accumulate_grad_batches", "val_check_interval", "check_val_every_n_epoch"):
            if config.trainer[name] == 0:
                raise ConfigError(f"trainer.{name} must be larger than 0")
        strategy, known = config.trainer.strategy, StrategyRegistry.available_strategies()
        if isinstance(strategy, str) and strategy not in known:  # if no name is near, Lightning has a message
            for near in difflib.get_close_matches(strategy, known, n=1, cutoff=0.8):
                raise ConfigError(f"there is no strategy {strategy!r}: did you mean {near!r}?")
        name = config.model.name_or_path
        if name is None and not any(each.startswith(("--config", "-c", "--model")) for each in sys.argv):
            raise ConfigError(_NO_MODEL.format(program=f"{PROGRAM} {self.subcommand}", example=_EXAMPLE))
        if name is not None:
            require_model(name, weights_for=self.subcommand or "")
            config.trainer.precision = config.trainer.precision or "bf16-true"
        if (config.trainer.max_epochs, config.trainer.max_steps, config.trainer.max_time) == (None, -1, None):
            config.trainer.max_epochs = 1

    def instantiate_classes(self) -> None:
        with option_errors(TypeError, ValueError, RuntimeError, OSError):
            super().instantiate_classes()

    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            print(f"\n{self.summary.describe(self.trainer)}")


def main(arguments: Sequence[str]) -> None:
    """Run the command line of `sys.argv`, where LightningCLI finds its subcommand and `arguments`."""
    # raised by Lightning's own use of torch.utils._pytree (lightning 2.6 with torch 2.13): not for our user to act on
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec", category=FutureWarning)
    # advertisements, which no run needs
    told = logging.getLogger(LightningCLI.__module__.replace(".cli", ".utilities.rank_zero"))
    told.addFilter(lambda record: "seamless cloud" not in record.getMessage())
    if not sys.stderr.isatty():  # a log, which bars fill
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    # torchrun repeats in its summary what `record` has noted of an error
    run = record(FinetuneCLI) if "TORCHELASTIC_ERROR_FILE" in os.environ else FinetuneCLI
    # a checkpoint that is none, or not there; what fails while the run computes keeps its traceback
    with option_errors(
        MisconfigurationException, FileNotFoundError, IsADirectoryError, EOFError, pickle.UnpicklingError
    ):
        run()
