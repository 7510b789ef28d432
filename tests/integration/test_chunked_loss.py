"""A loss without all logits under the strategy: wherever the output layer is, the run is the plain one."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_cxl
from lightning_cxl.sequences.chunked_loss import chunked_cross_entropy
from tests.cases import every_value
from tests.integration.llama import tiny_llama, with_lora
from tests.integration.training import EXACT, assert_identical, offload, train
from tests.models import Task

pytest.importorskip("peft")

STEPS = 4
VOCABULARY = 4096


class FullTask(Task):
    def loss(self, batch):
        x, y = batch
        return self.model(input_ids=x, labels=x.masked_fill(y % 3 == 0, -100), use_cache=False).loss


class ChunkedTask(FullTask):
    def loss(self, batch):
        with lightning_cxl.chunked_loss(self, tokens=16):
            return super().loss(batch)


class AroundTheRun(FullTask):
    """The same, in a context that begins before the run and outlives it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.context = lightning_cxl.chunked_loss(self, tokens=16)
        self.context.__enter__()


def frozen_head():
    model = tiny_llama()
    model.lm_head.requires_grad_(False)
    return model


MODELS = {
    "plain": tiny_llama,
    "tied": partial(tiny_llama, tie_word_embeddings=True),
    "frozen": frozen_head,
    "adapted": lambda: with_lora(tiny_llama(), ["q_proj", "lm_head"]),
}
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


def many_rows():
    tokens = torch.randint(0, VOCABULARY, (128, 16), generator=torch.Generator().manual_seed(0))  # attention is small
    return DataLoader(TensorDataset(tokens, tokens), batch_size=64)


@pytest.mark.usefixtures("device_apart")
@pytest.mark.parametrize("options", [HEAD_STREAMS, {}], ids=["the head streams", "the head stays"])
def test_never_all_logits_are_on_the_device(options):
    all_logits = 64 * 16 * VOCABULARY * 4
    peaks = []
    for task in FullTask, ChunkedTask, AroundTheRun:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        train(lambda: tiny_llama(vocab_size=VOCABULARY), offload(**options), task=task, steps=2, data=many_rows)
        peaks.append(torch.accelerator.max_memory_allocated())
    full, *chunked = peaks
    assert full - max(chunked) > 1.5 * all_logits  # both hold workspaces of kernels, too


@pytest.mark.usefixtures("device_apart")
@pytest.mark.parametrize("learns", [True, False])
def test_in_bfloat16_a_step_takes_the_bytes_of_the_gradient_and_one_chunk(learns):
    layer = nn.Linear(256, 16384, bias=False, device="apart", dtype=torch.bfloat16)
    hidden = torch.randn(1024, 256, device="apart", dtype=torch.bfloat16, requires_grad=learns)
    labels, chunk = torch.arange(1024, device="apart"), 64 * 16384
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with torch.set_grad_enabled(learns):
        loss = chunked_cross_entropy(layer.forward, layer, None, hidden, labels, None, tokens=64)
    if learns:
        loss.backward()
    gradients = layer.weight.nbytes + 2 * hidden.nbytes if learns else 0  # and the inputs together
    # logits, what they become in float32, and their gradient in bfloat16, or a copy that torch's softmax makes
    assert torch.accelerator.max_memory_allocated() - before < gradients + 1.1 * chunk * (8 if learns else 10)
