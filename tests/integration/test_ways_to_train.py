"""What users do in a step, with streamed weights: autocast, other lengths, other blocks, and going on after a stop."""

import logging
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_cxl import packed_arguments
from tests.cases import every_pair, every_value
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import EXACT, assert_identical, offload, train
from tests.models import Task, TinyTransformer

pytestmark = pytest.mark.usefixtures("late_copies")


class Recurrent(torch.nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.own, self.shared = torch.nn.RNN(32, 32, batch_first=True), shared

    def forward(self, x, *, scale):
        return x + self.shared(self.own(x)[0]) * scale


class OfRecurrent(TinyTransformer):
    """Blocks that share a module; torch's RNN keeps a list of its weights beside its parameters."""

    def __init__(self):
        super().__init__()
        shared = torch.nn.Linear(32, 32)
        self.blocks = torch.nn.ModuleList(Recurrent(shared) for _ in range(4))


class ChangesLength(Task):
    """Another length in every micro-batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        length = random.Random(batch_idx).randint(2, x.shape[1])
        return super().training_step((x[:, :length], y[:, :length]), batch_idx)


class PaddedLlama(LlamaTask):
    """Rows of different length: a mask goes to every block beside its input."""

    def loss(self, batch):
        x, y = batch
        mask = torch.ones_like(x)
        mask[0, 7:] = 0
        logits = self.model(input_ids=x, attention_mask=mask).logits
        return torch.nn.functional.cross_entropy(logits[mask.bool()], y[mask.bool()])


CASES = {
    "lengths, bf16-mixed": (TinyTransformer, ChangesLength, {"precision": "bf16-mixed"}),
    "recurrent blocks that share": (OfRecurrent, Task, {}),
    "SDPA with a mask": (lambda: tiny_llama(attn_implementation="sdpa", attention_dropout=0.1), PaddedLlama, {}),
    "attention without SDPA": (lambda: tiny_llama(attn_implementation="eager"), PaddedLlama, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_is_the_plain_run(case):
    make, task, trainer_args = CASES[case]
    arguments = {"task": task, "steps": 4, "trainer_args": {**trainer_args, "accumulate_grad_batches": 2}}
    assert_identical(train(make, "auto", **arguments), train(make, offload(**EXACT), **arguments))


# -- packed rows: recomputed units keep sequences apart as the forward did ---------------------------------------------

POSITIONS = torch.tensor([*range(6), *range(9), *range(1), *range(4), *range(12)])
LATE = slice(15, None)
"""Tokens behind the first two sequences."""


def rows():
    tokens = torch.randint(0, 37, (16, len(POSITIONS)), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens, POSITIONS.expand_as(tokens)), batch_size=2)


class PackedTask(Task):
    """The loss of the later sequences alone."""

    def loss(self, batch):
        ids, positions = batch
        labels = ids.masked_fill(positions == 0, -100)
        labels[:, : LATE.start] = -100
        return self.given(ids, labels, positions)

    def given(self, ids, labels, positions):
        arguments = packed_arguments(self.model, positions)
        return self.model(input_ids=ids, labels=labels, use_cache=False, **arguments).loss


class OtherNeighbours(PackedTask):
    """The same, with other tokens in the first sequences."""

    def given(self, ids, labels, positions):
        changed = torch.cat([36 - ids[:, : LATE.start], ids[:, LATE]], 1)
        return super().given(changed, labels, positions)


@pytest.mark.parametrize(("streams", "attention"), every_value([True, False], ["sdpa", "eager"]))
def test_is_the_plain_run_and_knows_nothing_of_neighbours(streams, attention):
    def model():
        return tiny_llama(attn_implementation=attention)

    def ours(task):
        return train(model, offload(stream_weights=streams, **EXACT), data=rows, task=task, steps=6)

    found = ours(PackedTask)
    assert_identical(train(model, "auto", data=rows, task=PackedTask, steps=6), found)
    other = ours(OtherNeighbours)
    assert other[0] == found[0]  # losses, bit for bit
    head = "model.lm_head.weight"
    assert torch.equal(other[1][head], found[1][head])


# -- models that checkpoint their blocks themselves: no block is computed three times in vain --------------------------


def checkpointed_llama(use_reentrant):
    model = tiny_llama()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    return model


@pytest.mark.parametrize(("use_reentrant", "streams"), every_value([False, True], [True, False]))
def test_hugging_face_checkpointing_is_switched_off_while_ours_runs(use_reentrant, streams, caplog):
    plain = train(lambda: checkpointed_llama(use_reentrant), "auto", task=LlamaTask, steps=4)
    model = checkpointed_llama(use_reentrant)
    calls = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with caplog.at_level(logging.INFO, "lightning_cxl"):
        ours = train(lambda: model, offload(stream_weights=streams, **EXACT), task=LlamaTask, steps=4)
    assert_identical(plain, ours)
    assert len(calls) == 4 * 3 * 2
    assert len([record for record in caplog.records if "checkpointing is switched off" in record.message]) == 1
    assert model.model.gradient_checkpointing and all(layer.gradient_checkpointing for layer in model.model.layers)


class Checkpointing(TinyTransformer):
    """Checkpoints its blocks, `span` at a time, and with `more` an operator beside them."""

    use_reentrant, span, more = False, 1, False

    def forward(self, tokens):
        x = self.embed(tokens)
        for start in range(0, len(self.blocks), self.span):
            x = checkpoint(self.some, x, start, use_reentrant=self.use_reentrant)
        return self.head(self.norm(x))

    def some(self, x, start):
        for block in self.blocks[start : start + self.span]:
            x = block(x)
        return torch.sin(x) if self.more else x


SPANS = [1, 2, 4]


@pytest.mark.parametrize(
    ("more", "use_reentrant", "span", "streams"), every_pair([False, True], [False, True], SPANS, [True, False])
)
def test_checkpoints_in_the_users_forward_nest_with_ours(more, use_reentrant, span, streams):
    """One that is not reentrant, and has units alone, computes none a third time."""
    calls = []

    def make(forwards=None):
        model = Checkpointing(depth=4)
        model.use_reentrant, model.span, model.more = use_reentrant, span, more
        if forwards is not None:
            part = next(part for part in model.blocks[0].modules() if isinstance(part, torch.nn.Linear))
            part.register_forward_pre_hook(lambda *_: forwards.append(1))
        return model

    ours = train(lambda: make(calls), offload(stream_weights=streams, **EXACT), steps=4)
    assert_identical(train(make, "auto", steps=4), ours)
    assert len(calls) == 4 * (3 if more or use_reentrant else 2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_updates_behind_the_backward_wait_for_both_recomputes(use_reentrant):
    def make():
        model = Checkpointing()
        model.use_reentrant = use_reentrant
        return model

    plain = train(make, offload(overlap_step=False), steps=5)
    assert_identical(plain, train(make, offload(on_overflow="ignore"), steps=5))
