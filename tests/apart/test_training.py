"""Tiny models of many kinds train on the device as on the CPU."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests import apart
from tests.apart.tiny_models import MODELS


def train(model, batch, device, steps=2):
    """Losses, and the gradients of the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_model_trains_as_on_the_cpu(name):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    there = copy.deepcopy(model).to("apart")
    before = apart.counters()
    apart.set_poison(True)
    found = train(there, batch, "apart")
    apart.set_poison(False)
    with sdpa_kernel(SDPBackend.MATH):  # the same kernels
        expected = train(model, batch, "cpu")
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    largest = max(grad.abs().max() for grad in expected[1].values())
    for parameter, grad in expected[1].items():
        assert (found[1][parameter] - grad).abs().max() <= 1e-5 * largest, parameter
    assert found[1].keys() == expected[1].keys()
    waited = apart.counters()["sync_kernels"] - before["sync_kernels"]
    assert waited <= 4, f"the host waited for {waited} kernels"


@pytest.mark.parametrize("delays", [{}, {"kernel": 0.0005}])
def test_checkpointed_dropout_is_recomputed_alike(delays):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 8)).to("apart")
    data = torch.randn(4, 8).to("apart")
    apart.set_delay(**delays)
    grads = []
    for recompute in (False, True):
        torch.manual_seed(1)
        out = checkpoint(model, data, use_reentrant=False) if recompute else model(data)
        grads.append(torch.autograd.grad(out.square().sum(), model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
