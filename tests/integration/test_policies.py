"""Policies that plan a whole run, under the Trainer: bytes are where they decide, and losses are the same."""

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_cxl.errors import TierFullError, UnsupportedError
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.policies import POLICIES, Decision
from lightning_cxl.run import run
from lightning_cxl.run.run import place_model
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

pytestmark = pytest.mark.on_cpu

SPEEDS = """
tiers:
  - {name: dram, adam_bytes_per_s: 200e9, device_read_bytes_per_s: 200e9, device_write_bytes_per_s: 200e9}
  - {name: cxl, adam_bytes_per_s: 100e9, device_read_bytes_per_s: 100e9, device_write_bytes_per_s: 100e9}
"""


class MomentumFar:
    """A user's own policy: momentum on the last tier, the rest on the first."""

    needs_speeds = False

    def decide(self, job, machine):
        far = {TensorRole.MOMENTUM: {machine.names[-1]: 1.0}}
        return Decision({role: far.get(role, {machine.names[0]: 1.0}) for role in job.free_classes()}, {})


@pytest.fixture
def speeds(tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_text(SPEEDS)
    return str(path)


def fit(model=None, **options):
    seed_everything(3, verbose=False)
    module = Task(model or TinyTransformer(vocab=512, width=128, depth=4))
    trainer = make_trainer(offload(**options), max_steps=2)
    trainer.fit(module, token_data(2, batch=2, length=64, vocab=512))
    return module.losses, trainer.strategy.report()


@pytest.mark.parametrize("policy", [*POLICIES, f"{__name__}.MomentumFar"])
def test_losses_do_not_depend_on_the_policy(policy, speeds):
    plain, _ = fit()
    losses, report = fit(policy=policy, tiers={"cxl": "2GiB"}, machine=speeds)
    assert losses == plain
    assert report["policy"] == policy


class AllOnSsd:
    """A policy that asks for what no policy may."""

    needs_speeds = False

    def decide(self, job, machine):
        return Decision({role: {"ssd": 1.0} for role in job.free_classes()}, {})


def test_a_policy_cannot_put_anything_on_ssd(tmp_path):
    with pytest.raises((UnsupportedError, ValueError), match="ssd"):
        fit(policy=f"{__name__}.AllOnSsd", tiers={"ssd": {"path": str(tmp_path), "budget": "1GiB"}})


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_state_of_torchs_own_optimizers_is_planned(optimizer):
    """Weights and gradients fit, what the first step makes does not."""
    model = TinyTransformer(vocab=512, width=128, depth=4)
    nbytes = 4 * sum(p.numel() for p in model.parameters())
    strategy = offload(policy="dram_only", tiers={"dram": int(2.8 * nbytes)}, cpu_adam=False)
    module = Task(model, optimizer, **({"momentum": 0.9} if optimizer == "sgd" else {}))
    with pytest.raises(TierFullError, match="cannot place"):
        make_trainer(strategy, max_steps=1).fit(module, token_data(1, batch=1, length=8, vocab=512))
    assert all(tier["held_bytes"] == 0 for tier in strategy.report()["tiers"].values())


def test_optimizers_are_made_once():
    calls = []

    class WithMore(Task):
        def configure_optimizers(self):
            calls.append(1)
            return torch.optim.AdamW([*self.parameters(), torch.nn.Parameter(torch.zeros(3))])

    make_trainer(offload(), max_steps=1).fit(WithMore(TinyTransformer()), token_data(1))
    assert len(calls) == 1


def test_optimizers_made_on_parameters_that_are_replaced_are_made_again(monkeypatch):
    def renew(model, *rest):
        owner = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
        owner.weight = torch.nn.Parameter(owner.weight.detach().clone())
        return place_model(model, *rest)

    monkeypatch.setattr(run, "place_model", renew)
    module = Task(TinyTransformer())
    strategy = offload()
    weights = {id(p) for p in module.parameters()}
    make_trainer(strategy, max_steps=1).fit(module, token_data(1))
    held = {p for group in strategy.optimizers[0].param_groups for p in group["params"]}
    assert held == set(module.parameters()) and {id(p) for p in held} != weights
    assert {strategy._session.trained.masters.name_of(p) for p in held} == {
        name for name, _ in module.named_parameters()
    }
