"""Models that checkpoint their blocks themselves: the same losses, and no block is computed three times in vain."""

import logging

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.cases import every_pair, every_value
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import EXACT, assert_identical, offload, train
from tests.models import TinyTransformer


def enable(model, use_reentrant):
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)(
        {"use_reentrant": use_reentrant}
    )


def checkpointed_llama(use_reentrant):
    model = tiny_llama()
    enable(model, use_reentrant)
    return model


def count_forwards(model):
    """Return a list that gets an entry whenever an MLP of a block runs."""
    calls = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(("use_reentrant", "streams"), every_value([False, True], [True, False]))
def test_hugging_face_checkpointing_is_switched_off_while_ours_runs(use_reentrant, streams, caplog):
    plain = train(lambda: checkpointed_llama(use_reentrant), "auto", task=LlamaTask, steps=4)
    model = checkpointed_llama(use_reentrant)
    calls = count_forwards(model)
    with caplog.at_level(logging.INFO, "lightning_cxl"):
        ours = train(lambda: model, offload(stream_weights=streams, **EXACT), task=LlamaTask, steps=4)
    assert_identical(plain, ours)
    assert len(calls) == 4 * 3 * 2
    assert len([record for record in caplog.records if "checkpointing is switched off" in record.message]) == 1
    assert model.model.gradient_checkpointing and all(layer.gradient_checkpointing for layer in model.model.layers)


def test_hugging_face_checkpointing_that_is_enabled_during_the_run():
    class Enables(LlamaTask):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                enable(self.model, False)

    plain = train(tiny_llama, "auto", task=Enables, steps=4)
    model = tiny_llama()
    calls = count_forwards(model)
    assert_identical(plain, train(lambda: model, offload(**EXACT), task=Enables, steps=4))
    assert len(calls) <= 4 * 3 * 2 + 3  # a first call may be under way when it is noticed


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
