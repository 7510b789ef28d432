"""What users do in a step, with streamed weights: autocast, other lengths, other blocks, and going on after a stop."""

import random

import pytest
import torch

from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import EXACT, assert_identical, offload, train
from tests.models import Task, TinyTransformer

pytestmark = pytest.mark.usefixtures("late_copies")


class DropsBlocks(TinyTransformer):
    """Runs other blocks in every step, in any order, some of them twice; with dropout, whose numbers must not shift."""

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.training:
            order = [int(torch.randint(len(self.blocks), ())) for _ in range(4)]
        else:
            order = range(len(self.blocks))
        for index in order:
            x = self.blocks[index](x, scale=0.5)
        return self.head(self.norm(x))


class ChangesLength(Task):
    """Another length in every micro-batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        length = random.Random(batch_idx).randint(2, x.shape[1])
        return super().training_step((x[:, :length], y[:, :length]), batch_idx)


class ScalesInside(Task):
    """Its own autocast around a part of the step, with the cache of casts that torch keeps by default."""

    def loss(self, batch):
        with torch.autocast(self.device.type, torch.bfloat16):
            return super().loss(batch)


class PaddedLlama(LlamaTask):
    """Rows of different length: a mask goes to every block beside its input."""

    def loss(self, batch):
        x, y = batch
        mask = torch.ones_like(x)
        mask[0, 7:] = 0
        logits = self.model(input_ids=x, attention_mask=mask).logits
        return torch.nn.functional.cross_entropy(logits[mask.bool()], y[mask.bool()])


CASES = {
    "autocast in the step": (TinyTransformer, ScalesInside, {}),
    "lengths, bf16-mixed": (TinyTransformer, ChangesLength, {"precision": "bf16-mixed"}),
    "dropped and repeated blocks": (lambda: DropsBlocks(depth=6), Task, {}),
    "SDPA with a mask": (lambda: tiny_llama(attn_implementation="sdpa", attention_dropout=0.1), PaddedLlama, {}),
    "attention without SDPA": (lambda: tiny_llama(attn_implementation="eager"), PaddedLlama, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_is_the_plain_run(case):
    make, task, trainer_args = CASES[case]
    # the gradients of several uses and micro-batches are added in another order than by autograd
    accumulate = 1 if case == "dropped and repeated blocks" else 2
    arguments = {"task": task, "steps": 4, "trainer_args": {**trainer_args, "accumulate_grad_batches": accumulate}}
    assert_identical(train(make, "auto", **arguments), train(make, offload(**EXACT), **arguments))
