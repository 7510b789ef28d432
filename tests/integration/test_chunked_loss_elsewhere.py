"""The loss in chunks around a training loop that is not the user's: that of transformers' Trainer."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

import lightning_cxl
from tests.integration.llama import tiny_llama
from tests.models import Task

pytestmark = pytest.mark.on_cpu


def run(folder, *, chunked, **options):
    """Train and evaluate; returns losses of steps and evaluations, and how often all logits were made."""
    model = tiny_llama()
    made = []
    model.lm_head.register_forward_hook(lambda module, args, output: made.append(type(output) is torch.Tensor))
    tokens = torch.randint(0, 37, (24, 40), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        eval_strategy="steps", eval_steps=2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows[:16], eval_dataset=rows[16:])
    with lightning_cxl.chunked_loss(model if chunked else Task(torch.nn.Identity()), tokens=16):
        trainer.train()
    history = trainer.state.log_history
    return [entry[key] for entry in history for key in ("loss", "eval_loss", "grad_norm") if key in entry], sum(made)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [{"bf16": True, "prediction_loss_only": True}, {}])
def test_a_trainer_inside_learns_the_same(tmp_path, options):
    full, _ = run(tmp_path, chunked=False, **options)
    chunked, made = run(tmp_path, chunked=True, **options)
    assert len(full) == 10
    assert chunked == pytest.approx(full, rel=2e-2 if options.get("bf16") else 1e-5)
    assert made == 0
