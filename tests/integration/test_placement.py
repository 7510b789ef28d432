"""Where bytes are after the strategy placed them: asked from the kernel, and from the accounts."""

from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn

import lightning_cxl
from lightning_cxl import ConfigError, residency
from lightning_cxl.errors import TierFullError
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.policies import POLICIES, Decision
from tests.integration.training import EXACT, assert_same_weights, make_trainer, offload
from tests.models import Block, Task, TinyTransformer, token_data

pytestmark = pytest.mark.on_cpu


class Inspect(Task):
    """Takes the strategy's report while gradients, state and weights all live."""

    def on_before_optimizer_step(self, optimizer):
        if self.global_step == 1:
            self.report = self.trainer.strategy.report()
            self.weights = {name: residency(p) for name, p in self.named_parameters()}
            self.grads = {name: residency(p.grad) for name, p in self.named_parameters() if p.grad is not None}
            self.state = {
                key: residency(value)
                for state in optimizer.state.values()
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and value.dim()
            }


def run(strategy, model=None):
    module = Inspect(model or TinyTransformer())
    make_trainer(strategy, max_steps=2).fit(module, token_data())
    return module


def test_everything_has_a_known_home():
    module = run(offload(tiers={"cxl": "1GiB"}))
    roles = module.report["roles"]
    weights = sum(p.numel() * 4 for p in module.parameters())
    assert roles["compute_weights"] == {"dram": weights}
    assert roles["momentum"] == roles["variance"] == {"dram": weights}
    unused = sum(p.numel() * 4 for p in module.model.unused.parameters())
    assert roles["compute_grads"] == {"dram": weights - unused}
    assert module.report["peak_roles"]["activations"]["cxl"] > 0
    assert module.report["planned_roles"]["momentum"] == {"dram": weights}
    tiers = module.report["tiers"]
    assert set(tiers) == {"dram", "cxl"}
    for tier in tiers.values():
        assert tier["budget_bytes"] <= tier["capacity_bytes"] and tier["used_bytes"] <= tier["peak_bytes"]
    for where in [*module.weights.values(), *module.grads.values(), *module.state.values()]:
        assert set(where) == {"dram"}, "the kernel says so"


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, maximize=True),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, foreach=True),
    "Rprop": torch.optim.Rprop,
}


class Own(Task):
    """Trains with a given optimizer, and looks where its state is after the first step."""

    def configure_optimizers(self):
        return self.optimizer(self.parameters())

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and isinstance(self.trainer.strategy, lightning_cxl.CXLOffloadStrategy):
            state = self.optimizers().optimizer.state
            self.tiers = {
                name: {tier for value in state[p].values() if torch.is_tensor(value) and value.dim()
                       for tier in residency(value)}
                for name, p in self.named_parameters() if p in state
            }  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_any_torch_optimizer_goes_where_the_module_of_its_parameter_asks(name):
    make = OPTIMIZERS[name]
    rules = {"*": {"optimizer_state": "cxl"}, "model.blocks.1": {"optimizer_state": "dram"}}
    trained = []
    for strategy in (offload(tier_rules=rules, **EXACT), "auto"):
        torch.manual_seed(3)
        trained.append(Own(TinyTransformer(), make))
        make_trainer(strategy, max_steps=4).fit(trained[-1], token_data())
    ours, plain = trained
    assert len(ours.tiers) == len(list(ours.parameters())) - 2, "all but the unused layer's"
    for name, tiers in ours.tiers.items():
        assert tiers == {"dram" if name.startswith("model.blocks.1.") else "cxl"}, name
    assert ours.losses == plain.losses
    assert_same_weights(ours, plain)


def test_rules_move_weights_gradients_and_state():
    rules = {"model.blocks.1*": {"weights": "cxl", "gradients": "cxl", "optimizer_state": "cxl"}}
    module = run(offload(tier_rules=rules))
    for name, where in [*module.weights.items(), *module.grads.items()]:
        assert set(where) == {"cxl" if name.startswith("model.blocks.1.") else "dram"}, name
    block = sum(p.numel() * 4 for p in module.model.blocks[1].parameters())
    for role in ("compute_weights", "compute_grads", "momentum", "variance"):
        assert module.report["roles"][role]["cxl"] == block


def test_init_module_and_configure_model_place_from_the_first_byte():
    @lightning_cxl.tier("cxl")
    class Decorated(Block):
        pass

    seen = {}

    class Late(Task):
        def configure_model(self):
            if self.model is None:
                self.model = nn.Sequential(nn.Embedding(37, 32), Decorated(32, 0.0), nn.Linear(32, 37))
                seen.update(decorated=residency(self.model[1].qkv.weight), plain=residency(self.model[2].weight))

    trainer = make_trainer("cxl_offload", max_steps=1)
    module = Late(None)
    trainer.fit(module, token_data())
    assert seen["decorated"] == {"cxl": 32 * 96 * 4} and seen["plain"] == {"dram": 32 * 37 * 4}
    # afterwards the run's memory is closed: an emulated tier goes by its real name
    assert residency(module.model[1].qkv.weight) == {"dram": 32 * 96 * 4}

    trainer = make_trainer("cxl_offload")
    with trainer.init_module():
        assert set(residency(Decorated(32, 0.0).out.weight)) == {"cxl"}
    trainer.strategy.teardown()


def test_shared_tensor_with_different_tiers_names_both():
    model = TinyTransformer(tied=True)
    rules = {"model.embed": {"weights": "cxl"}, "model.head": {"weights": "dram"}}
    with pytest.raises(ConfigError, match=r"model\.embed\.weight.*model\.embed.*cxl.*model\.head.*dram"):
        run(offload(tier_rules=rules), model)


def test_views_of_one_storage_are_left_together():
    model = TinyTransformer()
    model.norm.weight, model.norm.bias = map(nn.Parameter, torch.randn(2, 32))
    module = run("cxl_offload", model)
    assert model.norm.weight.untyped_storage().data_ptr() == model.norm.bias.untyped_storage().data_ptr()
    assert any("shared storage" in note for note in module.report["notes"])


# -- policies that plan a whole run: bytes are where they decide, and losses are the same ------------------------------

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


def fit_planned(model=None, **options):
    seed_everything(3, verbose=False)
    module = Task(model or TinyTransformer(vocab=512, width=128, depth=4))
    trainer = make_trainer(offload(**options), max_steps=2)
    trainer.fit(module, token_data(2, batch=2, length=64, vocab=512))
    return module.losses, trainer.strategy.report()


@pytest.mark.parametrize("policy", [*POLICIES, f"{__name__}.MomentumFar"])
def test_losses_do_not_depend_on_the_policy(policy, speeds):
    plain, _ = fit_planned()
    losses, report = fit_planned(policy=policy, tiers={"cxl": "2GiB"}, machine=speeds)
    assert losses == plain
    assert report["policy"] == policy


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
