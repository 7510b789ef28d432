"""Inputs of units in a run on the CPU: copied in the first step, then kept where they are, with the same report."""

import pytest
import torch

from lightning_cxl.memory.stacks import HostMemory
from lightning_cxl.placement.placement import TensorRole
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import EXACT, make_trainer, offload
from tests.models import token_data

pytestmark = pytest.mark.on_cpu


@pytest.fixture
def copies(monkeypatch):
    """Bytes of inputs that were copied, in order."""
    sizes = []
    allocate = HostMemory.allocate

    def spy(self, nbytes, placement, role, **arguments):
        if role is TensorRole.ACTIVATIONS:
            sizes.append(nbytes)
        return allocate(self, nbytes, placement, role, **arguments)

    monkeypatch.setattr(HostMemory, "allocate", spy)
    return sizes


class Held(LlamaTask):
    """Notes after every batch what the report says."""

    def on_train_batch_end(self, *_):
        if hasattr(self.trainer.strategy, "report"):
            self.reports.append(self.trainer.strategy.report())


def train(strategy, steps=4):
    torch.manual_seed(0)
    module = Held(tiny_llama(3))
    module.reports = []
    make_trainer(strategy, max_steps=steps).fit(module, token_data())
    return module


def test_only_the_first_step_copies_and_the_report_counts_all(copies):
    module = train(offload())
    assert len(copies) == 3
    tier = next(iter(module.reports[0]["peak_roles"]["activations"]))
    for report in module.reports:
        assert report["peak_roles"]["activations"] == report["planned_roles"]["activations"] == {tier: sum(copies)}
        assert report["roles"]["activations"] == {tier: 0}


def test_the_memory_of_the_first_copies_goes_back(copies):
    activations = next(iter(train(offload(), steps=1).reports[-1]["peak_roles"]["activations"]))
    held = [report["tiers"][activations]["held_bytes"] for report in train(offload()).reports]
    assert held[1] < held[0]


def test_a_tier_with_a_budget_gets_copies(copies):
    tier = next(iter(train(offload(), steps=1).reports[-1]["peak_roles"]["activations"]))
    copies.clear()
    train(offload(tiers={tier: "1GiB"}))
    assert len(copies) == 12


def test_losses_are_those_of_plain_lightning():
    ours, plain = train(offload(**EXACT), 6), train("auto", 6)
    assert ours.losses == plain.losses
