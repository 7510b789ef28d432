"""What a run on the CPU keeps where it lies, and counts: inputs of units after the first step, and gradients."""

from collections import defaultdict

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_cxl.memory.stacks import HostMemory
from lightning_cxl.placement.placement import TensorRole
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import EXACT, make_trainer, offload
from tests.models import token_data

pytestmark = pytest.mark.on_cpu

ROWS, WIDTH = 128, 256


@pytest.fixture
def allocated(monkeypatch):
    """Bytes of every buffer by role, in order."""
    sizes = defaultdict(list)
    allocate = HostMemory.allocate

    def spy(self, nbytes, placement, role, **arguments):
        sizes[role].append(nbytes)
        return allocate(self, nbytes, placement, role, **arguments)

    monkeypatch.setattr(HostMemory, "allocate", spy)
    return sizes


@pytest.fixture
def copies(allocated):
    """Bytes of inputs that were copied, in order."""
    return allocated[TensorRole.ACTIVATIONS]


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


class Writes(LightningModule):
    """Writes to the input of each unit after it, without a version."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.losses = []

    def training_step(self, batch, _):
        x = self.first(batch)
        for block in self.blocks:
            y = block(x)
            self.write(x)
            x = y * 1.0
        loss = x.square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Block(nn.Module):
    """Its graph keeps neither the input nor the output itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return 1.5 * torch.tanh(self.linear(x * 2))


def train_writing(strategy, write):
    torch.manual_seed(0)
    module = Writes(write)
    data = torch.randn(6 * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    make_trainer(strategy, max_steps=6).fit(module, DataLoader(list(data), batch_size=ROWS))
    return module.losses


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.data.zero_(),
        lambda x: x.data.add_(1.0),
        lambda x: x.detach().numpy().fill(0),
        lambda x: torch.from_dlpack(x.detach()).zero_(),
    ],
    ids=["zero data", "add to data", "numpy", "dlpack"],
)
def test_writes_without_a_version_train_like_plain_lightning(write, copies):
    assert train_writing(offload(**EXACT), write) == train_writing("auto", write)
    assert len(copies) == 18


# -- gradients ---------------------------------------------------------------------------------------------------------


class Gradients(Held):
    """Notes which gradients torch has allocated itself."""

    def on_before_optimizer_step(self, optimizer):
        memory = self.trainer.strategy.host.memory
        self.by_torch = {name: memory.tier_at(p.grad.data_ptr()) is None for name, p in self.named_parameters()}


def train_gradients(**options):
    torch.manual_seed(0)
    module = Gradients(tiny_llama(3))
    module.reports = []
    make_trainer(offload(**options), max_steps=3).fit(module, token_data())
    return module


def test_gradients_stay_where_autograd_made_them_and_the_report_counts_them(allocated):
    module = train_gradients()
    nbytes = sum(p.nbytes for p in module.parameters())
    assert all(module.by_torch.values())
    for report in module.reports:
        assert report["peak_roles"]["compute_grads"] == report["planned_roles"]["compute_grads"] == {"dram": nbytes}
    assert TensorRole.COMPUTE_GRADS not in allocated, "nor is room for them reserved"


@pytest.mark.parametrize("options", [{"tiers": {"dram": "1GiB"}}, {"tier_rules": {"*": {"gradients": "cxl"}}}])
def test_gradients_move_where_a_budget_or_a_tier_is_asked_for(options):
    assert not any(train_gradients(**options).by_torch.values())
