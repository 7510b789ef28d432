"""The Trainer of transformers on several ranks, each of which has its rows of the batches that one process gets."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments
from transformers.trainer_utils import set_seed

from lightning_cxl.sharding.fsdp import is_cut
from lightning_cxl.transformers import CXLTrainer
from tests.distributed.training import place, whole
from tests.integration.accelerate_loop import forget_accelerators
from tests.integration.hf_trainer import rows
from tests.integration.llama import tiny_llama
from tests.integration.quantised import quantise

BATCH = 4
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)


def of_all(**given: Any) -> dict[str, Any]:
    """Return arguments with which every number of ranks takes the same rows for a step."""
    forget_accelerators()
    rank, world = place()
    if world > 1:  # a run of Lightning before takes some away
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    defaults = {
        "logging_steps": 1, "learning_rate": 1e-3, "num_train_epochs": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "per_device_train_batch_size": BATCH // world, "dataloader_pin_memory": False,
        "per_device_eval_batch_size": BATCH // world, "use_cpu": True, "bf16": False, "adam_epsilon": 1e-5,
    }  # fmt: skip
    return {**defaults, **given}


def train(
    folder: str,
    *,
    options: dict[str, Any] | None = None,
    lora: bool | dict[str, Any] = False,
    biased: bool = False,
    tied: bool = False,
    quantised: str = "",
    dtype: torch.dtype = torch.float32,
    resume: str | None = None,
    evaluates_first: bool = False,
    trains: int = 1,
    **given: Any,
) -> dict[str, Any]:
    """Train on all ranks, and save the model; return what the Trainer has logged, and the weights."""
    set_seed(5)
    args = TrainingArguments(folder, **of_all(**given))
    model = tiny_llama(tie_word_embeddings=tied, attention_bias=biased).to(dtype)
    if quantised:
        model = tiny_llama(hidden_size=64)
        quantise(model, quantised)
    if lora:
        model = get_peft_model(model, replace(LORA, **(lora if isinstance(lora, dict) else {})))
    trainer = CXLTrainer(model, args, train_dataset=rows(24), eval_dataset=rows(8, seed=4), offload=options)
    return _trained(trainer, resume, folder, evaluates_first=evaluates_first, trains=trains)


def of_trl(name: str, folder: str, options: dict[str, Any] | str | None, **given: Any) -> dict[str, Any]:
    """Train with a trainer of TRL on all ranks.

    Args:
        name: of a function of `test_hf_trl`.
        folder: of its files.
        options: of ours, or `PLAIN` for TRL alone, which has DistributedDataParallel.
        **given: to that function, and arguments of the Trainer.
    """
    from tests.integration import test_hf_trl

    set_seed(5)
    return _trained(getattr(test_hf_trl, name)(Path(folder), options, **of_all(**given)), None, folder)


def _trained(
    trainer: Any, resume: str | None, folder: str, *, evaluates_first: bool = False, trains: int = 1
) -> dict[str, Any]:
    try:
        first = [trainer.evaluate()["eval_loss"]] if evaluates_first else []
        for _ in range(trains):
            trainer.train(resume_from_checkpoint=resume)
        log = trainer.state.log_history
        trainer.save_model(str(Path(folder) / "saved"))
        return {
            "losses": [each["loss"] for each in log if "loss" in each],
            "norms": [each["grad_norm"] for each in log if "grad_norm" in each],
            "cut": [is_cut(each) for each in trainer.accelerator._models],
            "log": [_measured(each) for each in log[:-1]],
            "evaluated": [*first, *(each["eval_loss"] for each in log if "eval_loss" in each)],
            "weights": {name: whole(parameter) for name, parameter in trainer.model.named_parameters()},
        }
    finally:
        if hasattr(trainer.accelerator, "offload"):
            trainer.accelerator.offload.close()  # `end` would let the process group go, too


def _measured(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what was logged of a step, but losses, norms and seconds."""
    return {
        name: value for name, value in entry.items()
        if not any(word in name for word in ("loss", "grad_norm", "time", "per_second"))
    }  # fmt: skip
