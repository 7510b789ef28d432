"""A loss without all logits under the strategy: wherever the output layer is, the run is the plain one."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

import lightning_cxl
from lightning_cxl.commands.plan import loss_on_meta
from lightning_cxl.inventory.dry_run import dry_run
from tests import training_device
from tests.cases import every_value
from tests.integration.llama import tiny_llama
from tests.integration.training import EXACT, assert_identical, offload, train
from tests.models import Task

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks

STEPS = 4
VOCABULARY = 4096


class FullTask(Task):
    """The model's own loss, from all logits."""

    def loss(self, batch):
        x, y = batch
        return self.model(input_ids=x, labels=x.masked_fill(y % 3 == 0, -100), use_cache=False).loss


class ChunkedTask(FullTask):
    """The same in chunks of 16 tokens."""

    def loss(self, batch):
        with lightning_cxl.chunked_loss(self, tokens=16):
            return super().loss(batch)


class AroundTheRun(FullTask):
    """The same, in a context that begins before the run and outlives it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.context = lightning_cxl.chunked_loss(self, tokens=16)
        self.context.__enter__()


def adapted_head():
    torch.manual_seed(1)
    return peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))


def frozen_head():
    model = tiny_llama()
    model.lm_head.requires_grad_(False)
    return model


def tied():
    return tiny_llama(tie_word_embeddings=True)


MODELS = {"plain": tiny_llama, "tied": tied, "frozen": frozen_head, "adapted": adapted_head}
HEAD_STREAMS = {"units": ["*.layers.?", "*.lm_head"], "stream_weights": True}


CASES = [*((name, {}) for name in MODELS), ("plain", HEAD_STREAMS)]


@pytest.mark.parametrize(("case", "task"), every_value(CASES, [ChunkedTask, AroundTheRun]), ids=str)
def test_is_the_plain_run(case, task):
    name, options = case
    expected = train(MODELS[name], "auto", task=FullTask, steps=STEPS)
    plain = train(MODELS[name], "auto", task=task, steps=STEPS)
    ours = train(MODELS[name], offload(**EXACT, **options), task=task, steps=STEPS)
    if not options:
        assert_identical(plain, ours)
    assert ours[0] == pytest.approx(expected[0], rel=1e-6)
    for key, value in expected[1].items():
        assert torch.allclose(ours[1][key], value, rtol=1e-4, atol=1e-5), key


# -- around the loop of transformers' Trainer --------------------------------------------------------------------------


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


@pytest.mark.on_cpu
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [{"bf16": True, "prediction_loss_only": True}, {}])
def test_a_trainer_inside_learns_the_same(tmp_path, options):
    full, _ = run(tmp_path, chunked=False, **options)
    chunked, made = run(tmp_path, chunked=True, **options)
    assert len(full) == 10
    assert chunked == pytest.approx(full, rel=2e-2 if options.get("bf16") else 1e-5)
    assert made == 0


# -- what a dry run says of it -----------------------------------------------------------------------------------------


SHAPE = {"vocab_size": 32_768, "hidden_size": 32, "intermediate_size": 32, "num_layers": 1}
ROWS, TOKENS = 64, 8  # blocks are small: the device apart has no flash kernel


@pytest.mark.parametrize(("dtype", "chunked"), every_value([torch.float32, torch.bfloat16], [True, False]))
def test_planned_device_memory_is_what_the_device_holds(chunked, dtype):
    if training_device.current.type == "cpu":
        pytest.skip("needs a device apart")
    with torch.device("meta"):
        planned_model = tiny_llama(**SHAPE).to(dtype)
    planned = dry_run(planned_model, [], loss_on_meta(planned_model, ROWS, TOKENS, chunked=chunked), min_bytes=1)
    model = tiny_llama(**SHAPE).to(dtype).to(training_device.current)
    for parameter in model.parameters():  # as the engine does, and the dry run
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    ids = torch.randint(0, 32_768, (ROWS, TOKENS)).to(training_device.current)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with lightning_cxl.chunked_loss(model if chunked else torch.nn.Identity()):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.accelerator.synchronize()
    held = torch.accelerator.max_memory_allocated() - before
    assert planned.device_peak_bytes == pytest.approx(held, rel=0.03)


def many_rows():
    tokens = torch.randint(0, VOCABULARY, (128, 16), generator=torch.Generator().manual_seed(0))  # attention is small
    return DataLoader(TensorDataset(tokens, tokens), batch_size=64)


@pytest.mark.parametrize("options", [HEAD_STREAMS, {}], ids=["the head streams", "the head stays"])
def test_never_all_logits_are_on_the_device(options):
    if training_device.current.type == "cpu":
        pytest.skip("needs a device apart")
    all_logits = 64 * 16 * VOCABULARY * 4
    peaks = []
    for task in FullTask, ChunkedTask, AroundTheRun:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        train(lambda: tiny_llama(vocab_size=VOCABULARY), offload(**options), task=task, steps=2, data=many_rows)
        peaks.append(torch.accelerator.max_memory_allocated())
    full, *chunked = peaks
    assert max(chunked) < all_logits / 2 < 2 * all_logits < full
