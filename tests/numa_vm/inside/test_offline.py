import warnings
from pathlib import Path

import pytest
import torch

from lightning_cxl import MissingTierWarning, SpillWarning, residency
from lightning_cxl.memory.host_memory import HostMemory
from lightning_cxl.memory.placement import Placement, TensorRole
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

STEPS, OFFLINE_AT = 4, 2


@pytest.fixture
def take_offline(machine, cards):
    """Return a function that takes the card's memory offline; it is back at the end."""
    if not machine.nodes[-1].hot:
        pytest.skip("memory that is not movable cannot be taken offline")
    blocks = [path.name for path in Path(f"/sys/devices/system/node/node{cards[-1]}").glob("memory[0-9]*")]
    states = [Path("/sys/devices/system/memory", name, "state") for name in blocks]
    assert states

    def take():
        for state in states:
            state.write_text("offline")

    yield take
    for state in states:
        if state.read_text().strip() == "offline":
            state.write_text("online_movable")


class Offlined(Task):
    def __init__(self, take_offline):
        super().__init__(TinyTransformer(64, 128, 2), scheduler=False)
        self.take_offline, self.tiers = take_offline, []

    def on_before_optimizer_step(self, optimizer):
        if self.global_step == OFFLINE_AT:
            self.take_offline()
        if self.global_step:
            self.tiers.append(set().union(*(residency(optimizer.state[p]["exp_avg"]) for p in optimizer.state)))
            self.momentum = self.trainer.strategy.report()["roles"]["momentum"]


def train(take_offline):
    """Return losses, the tiers of momentum step by step, what the report says of it at the end, and warnings."""
    torch.manual_seed(1)
    module = Offlined(take_offline)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(offload(tier_rules={"*": "cxl"}), max_steps=STEPS)
        trainer.fit(module, token_data(STEPS, batch=2, length=64, vocab=64))
    kinds = {each.category for each in caught} & {MissingTierWarning, SpillWarning}
    return module.losses, module.tiers, module.momentum, kinds


def test_a_training_goes_on_where_the_kernel_moves_its_pages(take_offline):
    losses, tiers, momentum, warned = train(lambda: None)
    assert (tiers, set(momentum), warned) == ([{"cxl"}] * 3, {"cxl"}, set())
    found = train(take_offline)
    assert found[:2] == (losses, [{"cxl"}, {"dram"}, {"dram"}])
    assert found[2] == momentum, "the report says where it was allocated"
    found = train(lambda: None)  # begins without the card
    assert (found[0], found[3]) == (losses, {MissingTierWarning})


def test_memory_that_is_allocated_afterwards_spills(take_offline, topology):
    memory = HostMemory(topology)
    take_offline()
    with pytest.warns(SpillWarning, match="`cxl`"):
        buffer = memory.allocate(1 << 20, Placement(("cxl", "dram")), TensorRole.MOMENTUM)
    assert residency(buffer.tensor((1 << 18,), torch.float32).fill_(1)) == {"dram": 1 << 20}
