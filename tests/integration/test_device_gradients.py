"""Gradients that come from a device: all of them, once, at the right place, whatever the host does meanwhile."""

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn

from tests.integration.training import EXACT, make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

IGNORE = {"on_overflow": "ignore"}  # updates run behind the backward


def fit(strategy, *, make_model=lambda: TinyTransformer(dropout=0.0), task=Task, steps=4, optimizer="adamw", batch=2, **kwargs):
    """Train; returns the module and the weights after it."""
    seed_everything(5, verbose=False)
    module = task(make_model(), optimizer)
    make_trainer(strategy, max_steps=steps, **kwargs).fit(module, token_data(batch=batch))
    return module, {name: value.cpu().clone() for name, value in module.state_dict().items()}


def assert_same(one, other):
    assert one[0].losses == other[0].losses and len(set(one[0].losses)) > 1
    for name, value in other[1].items():
        assert torch.equal(one[1][name], value), name


# -- a buffer at the address of an old gradient ------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_bfloat16_weights_under_torchs_own_optimizers(optimizer, accumulate):
    """Gradients of 16 bits land in staging memory, which may be where an old float32 gradient was."""
    arguments = {"optimizer": optimizer, "precision": "bf16-true", "accumulate_grad_batches": accumulate, "steps": 6}
    assert_same(fit(offload(**EXACT), **arguments), fit(offload(stream_weights=False, **EXACT), **arguments))


# -- gradients that come before their unit -----------------------------------------------------------------------------


class AddsLast(nn.Module):
    """The gradient of `shift` needs nothing that is recomputed: it comes before the unit is entered in backward."""

    def __init__(self, width, length):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.shift = nn.Parameter(torch.zeros(length, width))

    def forward(self, x):
        return x + torch.tanh(self.inner(x)) + self.shift


class Shifted(TinyTransformer):
    def __init__(self, length=12):
        super().__init__(dropout=0.0)
        self.blocks = nn.ModuleList(AddsLast(32, length) for _ in range(4))

    def forward(self, tokens):
        x = self.embed(tokens)[0]  # without a batch, so that the gradient of `shift` is that of the output itself
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("options", [EXACT, {}, IGNORE], ids=str)
def test_a_parameter_that_is_added_last(options, accumulate):
    arguments = {"make_model": Shifted, "accumulate_grad_batches": accumulate, "batch": 1}
    ours = fit(offload(**options), **arguments)
    assert_same(ours, fit("auto" if options is EXACT else offload(stream_weights=False), **arguments))
