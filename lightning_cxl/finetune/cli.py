"""The main job: LightningCLI over `CausalLM` and `TextData`; short errors about options; what a run ends with."""

import difflib
import logging
import os
import re
import resource
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import IO, Any, NoReturn

import datasets
import transformers
from torch.distributed.elastic.multiprocessing.errors import record

from lightning_cxl.commands.parsers import COMMANDS, PROGRAM
from lightning_cxl.errors import ConfigError, LightningCXLError
from lightning_cxl.finetune.data import TextData
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.integrations import lightning
from lightning_cxl.text import format_bytes
from lightning_cxl.weights.hf import require_model

_EXAMPLE = "--config examples/configs/finetune_stdlib.yaml"
_UNKNOWN = re.compile(r"unrecognized arguments: .*?--([\w.-]+)|does not accept option '([\w.-]+)'")
_MOST_LINES, _MOST_WIDTH = 12, 240
_PARSERS = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "jsonargparse"}
_ACCIDENTS = (ArithmeticError, LookupError, AttributeError, AssertionError)  # say nothing about an option


class FitSummary(lightning.Callback):
    """Collects what a run of `CausalLM` ends with; `describe` shows it.

    The loss before training is the one of Lightning's sanity check, when that covers the whole validation set
    (``num_sanity_val_steps=-1``); a resumed run shows the one of its first start.
    """

    def __init__(self, max_new_tokens: int = 64) -> None:
        self.max_new_tokens = max_new_tokens
        self.before: float | None = None
        self.after, self.sample = "not measured", ""

    def on_sanity_check_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.num_sanity_val_batches == trainer.num_val_batches and "val_loss" in trainer.callback_metrics:
            self.before = float(trainer.callback_metrics["val_loss"])

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and "val_loss" in trainer.callback_metrics:
            self.after = f"{float(trainer.callback_metrics['val_loss']):.4f} (step {trainer.global_step})"

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        if isinstance(pl_module, CausalLM) and isinstance(data, TextData) and data.tokenizer is not None:
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

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, KeyboardInterrupt) and trainer.state.fn == "fit" and trainer.is_global_zero:
            callback = trainer.checkpoint_callback
            saved = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
            advice = f"saved: {saved}\ngo on from there: the same command with --ckpt_path {saved}"
            advice = advice if saved else "no checkpoint was saved yet: lower ModelCheckpoint's every_n_train_steps"
            print(f"\ninterrupted after step {trainer.global_step}\n{advice}", file=sys.stderr)

    def state_dict(self) -> dict[str, Any]:
        return {"loss_before": self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict["loss_before"]

    def describe(self, trainer: lightning.Trainer) -> str:
        """Return everything as text; the memory report only under a strategy that has one."""
        before = "not measured" if self.before is None else f"{self.before:.4f}"
        peak = format_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        report = [str(trainer.strategy)] if hasattr(trainer.strategy, "report") else []
        losses, sample = f"validation loss: before {before}, after {self.after}", f"sample:\n{self.sample}"
        return "\n\n".join([losses, sample, *report, f"peak host memory of this process: {peak}"])


class ShortErrors(lightning.LightningArgumentParser):
    """A parser whose errors have a few lines, and the nearest name; ``--help`` shows all options."""

    _file = "<unicode string>"

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        self._file = str(path)
        return super().parse_path(path, *args, **kwargs)

    def print_usage(self, file: IO[str] | None = None) -> None:
        pass

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        message = message.replace("<unicode string>", self._file)
        lines = [line if len(line) <= _MOST_WIDTH else f"{line[:_MOST_WIDTH]} ..." for line in message.splitlines()]
        lines = [*lines[:_MOST_LINES], *(["..."] if len(lines) > _MOST_LINES else [])]
        if found := _UNKNOWN.search(message):
            parser: Any = getattr(ex, "subcommand_parser", None) or self
            near = difflib.get_close_matches(f"--{found[1] or found[2]}", parser._option_string_actions, n=1)
            lines += [f"did you mean `{each}`?" for each in near]
        super().error("\n".join(lines), ex)
        raise AssertionError("the parser goes on after an error")


@contextmanager
def option_errors() -> Iterator[None]:
    """Turn errors that Lightning or jsonargparse raise into `ConfigError`; all others keep their traceback."""
    try:
        yield
    except (LightningCXLError, ModuleNotFoundError):
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, LightningCXLError):
            cause = cause.__cause__  # not __context__: a bug in what handles our error is no error of ours
        if cause is not None:  # jsonargparse put our error into one of its own
            raise cause from error
        raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        of_options = raised_in.split(".")[0] in _PARSERS or raised_in == "lightning_cxl.run.checkpoint"
        of_options = of_options or isinstance(error, UnpicklingError)  # torch is asked to read another file
        if not of_options or isinstance(error, _ACCIDENTS):
            raise
        raise ConfigError(str(error).strip() or type(error).__name__) from error


class FinetuneCLI(lightning.LightningCLI):
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
        strategy, known = config.trainer.strategy, lightning.StrategyRegistry.available_strategies()
        if isinstance(strategy, str) and strategy not in known:  # if no name is near, Lightning has a message
            for near in difflib.get_close_matches(strategy, known, n=1, cutoff=0.8):
                raise ConfigError(f"there is no strategy {strategy!r}: did you mean {near!r}?")
        name = config.model.name_or_path
        if name is None and not any(each.startswith(("--config", "-c", "--model")) for each in sys.argv):
            raise ConfigError(
                "a model is needed: a hub id or a folder, or a file with options. For example:\n"
                f"  {PROGRAM} {self.subcommand} --model.name_or_path Qwen/Qwen2.5-0.5B --data.text_files chats.jsonl\n"
                f"  {PROGRAM} {self.subcommand} {_EXAMPLE}"
            )
        if name is not None:
            require_model(name, needs_weights=True)
            config.trainer.precision = config.trainer.precision or "bf16-true"
        if (config.trainer.max_epochs, config.trainer.max_steps, config.trainer.max_time) == (None, -1, None):
            config.trainer.max_epochs = 1

    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            print(f"\n{self.summary.describe(self.trainer)}")


def main(arguments: Sequence[str]) -> None:
    """Run the command line of `sys.argv`, where LightningCLI finds its subcommand and `arguments`."""
    # raised by Lightning's own use of torch.utils._pytree (lightning 2.6 with torch 2.13): not for our user to act on
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec", category=FutureWarning)
    # advertisements, which no run needs
    told = logging.getLogger(lightning.LightningCLI.__module__.replace(".cli", ".utilities.rank_zero"))
    told.addFilter(lambda record: "seamless cloud" not in record.getMessage())
    if not sys.stderr.isatty():  # a log, which bars fill
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    # torchrun repeats in its summary what `record` has noted of an error
    run = record(FinetuneCLI) if "TORCHELASTIC_ERROR_FILE" in os.environ else FinetuneCLI
    with option_errors():
        run()
