"""The command line of the main job: LightningCLI over `CausalLM` and `TextData`."""

import difflib
import logging
import os
import sys
import warnings
from collections.abc import Sequence

import datasets
import transformers

from lightning_cxl.commands.overview import COMMANDS, PROGRAM
from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.data import TextData
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.finetune.option_errors import option_errors
from lightning_cxl.finetune.parser import ShortErrors
from lightning_cxl.finetune.summary import FitSummary
from lightning_cxl.integrations.lightning.lightning_api import LightningCLI, StrategyRegistry
from lightning_cxl.weights.model_names import require_model

_NO_MODEL = """a model is needed: a hub id or a folder, or a file with options. For example:
  {program} --model.name_or_path Qwen/Qwen2.5-0.5B --data.text_files chats.jsonl
  {program} --config examples/configs/finetune_stdlib.yaml"""


def _help(name: str) -> str:
    more = "" if name == "fit" else " --ckpt_path last.ckpt"
    return f"{COMMANDS[name].does}; example: {PROGRAM} {name} --config examples/configs/finetune_stdlib.yaml{more}"


class FinetuneCLI(LightningCLI):
    """``fit``, ``validate``, ``test`` and ``predict``; model and data agree on tokenizer and vocabulary."""

    def __init__(self) -> None:
        """Parse `sys.argv` and run."""
        self.summary = FitSummary()
        super().__init__(
            CausalLM,
            TextData,
            parser_class=ShortErrors,
            seed_everything_default=42,
            trainer_defaults={"strategy": "cxl_offload", "num_sanity_val_steps": -1, "callbacks": [self.summary]},
            parser_kwargs={
                "prog": PROGRAM,
                "description": "Train a causal language model on text or conversations, and see how well it does.",
                **{name: {"description": _help(name)} for name in self.subcommands()},
            },
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # CausalLM saves its own plain options
            # a job that SLURM puts back into its queue keeps its number, which names the folder of the logger
            save_config_kwargs={"overwrite": "SLURM_RESTART_COUNT" in os.environ},
        )

    def add_arguments_to_parser(self, parser) -> None:  # type: ignore[no-untyped-def]  # jsonargparse is untyped here
        """Link the options that model and data share."""
        parser.link_arguments("model.name_or_path", "data.tokenizer_name_or_path")
        parser.link_arguments("data.vocab_size", "model.vocab_size")

    def before_instantiate_classes(self) -> None:
        """Refuse what Lightning trips over, and names of nothing, before anything is read; fill in what a run needs.

        Raises:
            ConfigError: no model was chosen; a number of the Trainer that must not be 0; no such strategy or model, or
                the hub cannot be asked for it.
        """
        config = self.config[self.subcommand]
        for name in ("accumulate_grad_batches", "val_check_interval", "check_val_every_n_epoch"):
            if config.trainer[name] == 0:
                raise ConfigError(f"trainer.{name} must be larger than 0")
        _check_strategy(config.trainer.strategy)
        name = config.model.name_or_path
        if name is None and not any(each.startswith(("--config", "-c", "--model")) for each in sys.argv):
            raise ConfigError(_NO_MODEL.format(program=f"{PROGRAM} {self.subcommand}"))
        if name is not None:
            require_model(name, weights_for=self.subcommand or "")
            config.trainer.precision = config.trainer.precision or "bf16-true"
        if (config.trainer.max_epochs, config.trainer.max_steps, config.trainer.max_time) == (None, -1, None):
            config.trainer.max_epochs = 1

    def after_fit(self) -> None:
        """Print the summary (Lightning calls this after ``fit``)."""
        if self.trainer.is_global_zero:
            print(f"\n{self.summary.describe(self.trainer)}")


def _check_strategy(name: object) -> None:
    """Say the nearest name for one that is not registered; where none is near, Lightning's own message does."""
    known = StrategyRegistry.available_strategies()
    if not isinstance(name, str) or name in known:
        return
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if near:
        raise ConfigError(f"there is no strategy {name!r}: did you mean {near[0]!r}?")


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
    with option_errors():
        FinetuneCLI()
