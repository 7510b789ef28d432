"""Policies that plan a whole run, under the Trainer: bytes are where they decide, and losses are the same."""

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_cxl.errors import ConfigError, TierFullError
from lightning_cxl.policies.api import Decision
from lightning_cxl.policies.registry import POLICIES
from lightning_cxl.strategy import CXLOffloadStrategy
from lightning_cxl.tiers.placement import TensorRole
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

MIB = 2**20
STATE = ("momentum", "variance")
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


class AllNear:
    """One that is asked tensor by tensor."""

    def place(self, request, free):
        from lightning_cxl.tiers.placement import Placement

        return Placement(("dram", "cxl"), reason="all near")


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


@pytest.mark.parametrize("policy", [*POLICIES, f"{__name__}.MomentumFar", f"{__name__}.AllNear"])
def test_losses_do_not_depend_on_the_policy(policy, speeds):
    plain, _ = fit()
    losses, report = fit(policy=policy, machine=speeds, tiers={"cxl": "2GiB"})
    assert losses == plain
    assert report["policy"] == (policy if policy != f"{__name__}.AllNear" else "AllNear")


@pytest.mark.filterwarnings("ignore::lightning_cxl.errors.SpillWarning")  # pools waste much of such a small budget
def test_latency_first_fills_dram_with_what_the_optimizer_touches(speeds):
    _, free = fit(policy="latency_first", machine=speeds)
    nbytes = free["peak_roles"]["momentum"]["dram"]
    budget = 4 * nbytes  # room for momentum and variance, slack, and an equal share of some of the rest
    _, report = fit(policy="latency_first", machine=speeds, tiers={"dram": budget, "cxl": "2GiB"})
    for role in STATE:
        assert set(report["peak_roles"][role]) == {"dram"}
        assert "fits in DRAM" in report["reasons"][role][0]
    assert report["tiers"]["dram"]["held_bytes"] <= budget
    assert set(report["planned_roles"]["compute_grads"]) == {"dram", "cxl"}, "mixed, as what does not fit is"


def test_interleaving_halves_what_is_large_enough(speeds):
    model = TinyTransformer(vocab=8192, width=512, depth=1)  # an embedding of 16 MiB: several stripes
    _, report = fit(model, policy="interleave", machine=speeds)
    for role in STATE:
        tiers = report["peak_roles"][role]
        assert tiers["cxl"] == pytest.approx(tiers["dram"], abs=4 * MIB)


def test_a_rule_beats_the_policy(speeds):
    _, report = fit(policy="dram_only", tier_rules={"*": {"optimizer_state": "cxl"}})
    assert all(set(report["peak_roles"][role]) == {"cxl"} for role in STATE)
    assert set(report["peak_roles"]["compute_weights"]) == {"dram"}


def test_what_does_not_fit_is_refused_before_anything_is_allocated():
    strategy = CXLOffloadStrategy(policy="dram_only", tiers={"dram": "1MiB"})
    module = Task(TinyTransformer(vocab=512, width=128, depth=4))
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    with pytest.raises(TierFullError, match=r"cannot place .* on tier `dram`"):
        make_trainer(strategy, max_steps=1).fit(module, token_data(1, batch=1, length=8, vocab=512))
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == before
    assert all(tier["held_bytes"] == 0 for tier in strategy.report()["tiers"].values())


def test_state_that_does_not_fit_is_refused_before_weights_move():
    strategy = CXLOffloadStrategy(tiers={"dram": "4MiB", "cxl": "2MiB"})  # weights fit, gradients and state do not
    module = Task(TinyTransformer(vocab=512, width=128, depth=4))
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    assert 4 * sum(p.numel() for p in module.parameters()) < 4 * MIB
    with pytest.raises(TierFullError, match="cannot place"):
        make_trainer(strategy, max_steps=1).fit(module, token_data(1, batch=1, length=8, vocab=512))
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fastest"}, "there is no policy 'fastest'"),
        ({"policy": ""}, "policy must be a policy's name"),
        ({"policy": 3}, "policy=3 has no method `decide`"),
        ({"machine": 3}, "machine must be the path"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        CXLOffloadStrategy(**options)


def test_a_policy_that_needs_speeds_says_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_CXL_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"policy 'bandwidth' needs the speeds.*calibrate"):
        fit(policy="bandwidth")


def test_the_policy_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("LIGHTNING_CXL_POLICY", "dram_only")
    _, report = fit()
    assert report["policy"] == "dram_only"
    assert set(report["peak_roles"]["activations"]) == {"dram"} if "activations" in report["peak_roles"] else True


def test_an_object_is_a_policy():
    _, report = fit(policy=MomentumFar())
    assert set(report["peak_roles"]["momentum"]) == {"cxl"}
    assert set(report["peak_roles"]["variance"]) == {"dram"}
    assert report["policy"] == "MomentumFar"


def test_optimizers_made_on_parameters_that_are_replaced_are_made_again():
    class Renewing(torch.nn.Module):
        """Makes a new parameter when it is moved or converted, as some quantised layers do."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

    module = Task(TinyTransformer())
    strategy = offload()
    setup_model = strategy.runtime.setup_model

    def renew(model):
        owner = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
        owner.weight = torch.nn.Parameter(owner.weight.detach().clone())
        setup_model(model)

    strategy.runtime.setup_model = renew
    weights = {id(p) for p in module.parameters()}
    make_trainer(strategy, max_steps=1).fit(module, token_data(1))
    held = {p for group in strategy.optimizers[0].param_groups for p in group["params"]}
    assert held == set(module.parameters()) and {id(p) for p in held} != weights
