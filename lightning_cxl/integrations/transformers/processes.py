"""`ShardedTrainer`: the part of our Trainer that is about a model cut over several processes.

A folder ``checkpoint-N`` has whole weights, as transformers writes them, and beside them ``sharded_optimizer``, to
which each process writes its part. Any number of processes goes on from it. See [Note: Sharded checkpoints].
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from lightning_cxl.integrations.transformers.trainer_accelerator import TrainerAccelerator
from lightning_cxl.run import loop_files
from lightning_cxl.run.checkpoint_file import load_file
from lightning_cxl.run.checkpoint_folder import remove
from lightning_cxl.run.cutting import taking_whole, whole_state
from lightning_cxl.run.sharded_checkpoint import is_sharded_checkpoint
from lightning_cxl.sharding.fsdp import is_cut


class ShardedTrainer:
    """Before a Trainer in the bases of a class: it saves and loads a model that is cut."""

    accelerator: TrainerAccelerator
    model: nn.Module
    args: Any
    optimizer: Any
    lr_scheduler: Any

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Gather weights on the first process, which writes them; every process calls this."""
        if state_dict is None and is_cut(self.model):
            names = self._names_that_may_be_saved()
            state_dict = whole_state(self.model, names.__contains__)
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _names_that_may_be_saved(self) -> set[str]:
        """Return the weights that files may have: of a model with adapters, all that peft chooses from.

        These are adapters, whatever else is trained, such as biases, and embeddings, whose vocabulary may have grown.
        """
        model: Any = self.model
        names = set(model.state_dict())
        adapters = getattr(model, "peft_config", None)
        if adapters is None:
            return names
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        kept = {id(p) for end in ends if end is not None for p in end.parameters()}
        chosen = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad or id(p) in kept}
        return {name for name in names if name in chosen or not adapters.keys().isdisjoint(name.split("."))}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_cut(self.model):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            if self.args.should_save and is_sharded_checkpoint(_folder(output_dir)):
                remove(_folder(output_dir))  # of several processes, which have written here before
            return
        offload = self.accelerator.offload
        path = _folder(output_dir)
        loop_files.save(path, self.model, offload.optimizers_of(self.model), offload, {}, weights=False)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if is_sharded_checkpoint(_folder(checkpoint)):
            offload = self.accelerator.offload
            numbered = dict(enumerate(offload.optimizers_of(self.model)))
            loop_files.load(_folder(checkpoint), self.model, numbered, offload, strict=True, weights=False)
        elif is_cut(self.model) and os.path.isfile(path := os.path.join(checkpoint, OPTIMIZER_NAME)):
            # transformers would read the state of the whole model onto every device; a mapped file has its pages once
            self.optimizer.load_state_dict(load_file(Path(path), "cpu", True))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._taking_whole():
            super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with self._taking_whole():
            super()._load_best_model()  # type: ignore[misc]

    def _taking_whole(self) -> ExitStack:
        region = ExitStack()
        if is_cut(self.model):
            region.enter_context(taking_whole(self.model))
        return region


def _folder(checkpoint: str) -> Path:
    return Path(checkpoint) / "sharded_optimizer"
