"""What the tests of transformers' Trainer share: a tiny Llama, its data, and trainers on the device under test."""

import torch
from transformers import Trainer, TrainingArguments

from lightning_cxl.transformers import CXLTrainer
from tests.integration.accelerate_loop import EXACT, PLAIN, forget_accelerators
from tests.integration.llama import tiny_llama
from tests.integration.training import assert_identical, weights_of

__all__ = ["EXACT", "PLAIN", "assert_identical"]
NUM_TOKENS = 8


def rows(num_rows=16, seed=3):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 37, (num_rows, NUM_TOKENS), generator=generator).tolist()
    return [{"input_ids": each, "labels": each} for each in tokens]


def arguments(folder, *, cls=TrainingArguments, **given):
    """Return arguments for a short training that logs every step, on the device under test."""
    forget_accelerators()
    defaults = {
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    bf16 = given.pop("bf16", False)
    args = cls(str(folder), **{**defaults, "bf16": False, **given})
    if bf16:  # which the constructor refuses where it finds no GPU
        args.bf16, args.mixed_precision = True, "bf16"
    return args


def make_trainer(folder, offload=PLAIN, *, model=None, parts=None, ours=CXLTrainer, **given):
    """Return transformers' own Trainer, or ours with these options."""
    args = arguments(folder, **given)
    parts = {"train_dataset": rows(), **(parts or {})}
    model = tiny_llama() if model is None else (model or None)
    if offload == PLAIN:
        return Trainer(model, args, **parts)
    return ours(model, args, offload=offload, **parts)


def finish(trainer):
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in logged]
    result = losses, weights_of(trainer.model)
    getattr(trainer, "end", trainer.accelerator.end_training)()  # transformers 5.17 has no `end`
    return result


def train(folder, offload=PLAIN, *, resume=None, **given):
    trainer = make_trainer(folder, offload, **given)
    trainer.train(resume_from_checkpoint=resume)
    return finish(trainer)


def assert_close(plain, ours, atol=1e-6):
    """Losses and rates are as close as rounding lets them be; norms, which are larger, relatively."""
    assert len(plain[0]) == len(ours[0])
    mine, others = torch.tensor(ours[0], dtype=torch.double), torch.tensor(plain[0], dtype=torch.double)
    torch.testing.assert_close(mine[:, [0, 2]], others[:, [0, 2]], rtol=0, atol=atol)
    torch.testing.assert_close(mine[:, 1], others[:, 1], rtol=10 * atol, atol=atol)
