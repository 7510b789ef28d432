"""Where bytes are after the strategy placed them: asked from the kernel, and from the accounts."""

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn

import lightning_cxl
from lightning_cxl import ConfigError, residency
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.policies import POLICIES, Decision
from tests.integration.training import EXACT, make_trainer, offload
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
                f"{name} {key}": residency(value)
                for name, parameter in self.named_parameters()
                for key, value in optimizer.state.get(parameter, {}).items()
                if isinstance(value, torch.Tensor) and value.dim()
            }


def run(strategy, model=None, **optimizer):
    seed_everything(3, verbose=False)
    module = Inspect(model or TinyTransformer(), **optimizer)
    make_trainer(strategy, max_steps=2).fit(module, token_data())
    return module


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({}, {}),
        (EXACT, {"optimizer": "sgd", "momentum": 0.9}),
        (EXACT, {"optimizer": "rmsprop", "momentum": 0.9, "centered": True}),  # three tensors of state
    ],
    ids=str,
)
def test_everything_has_a_known_home_and_rules_move_weights_gradients_and_state(options, optimizer):
    rules = {"model.blocks.1*": {"weights": "cxl", "gradients": "cxl", "optimizer_state": "cxl"}}
    module = run(offload(tiers={"cxl": "1GiB"}, tier_rules=rules, **options), **optimizer)
    roles, tiers = module.report["roles"], module.report["tiers"]
    block = sum(p.numel() * 4 for p in module.model.blocks[1].parameters())
    weights = sum(p.numel() * 4 for p in module.parameters())
    unused = sum(p.numel() * 4 for p in module.model.unused.parameters())
    expected = {"dram": weights - block, "cxl": block}
    assert roles["compute_weights"] == expected
    state = expected if not optimizer else {**expected, "dram": expected["dram"] - unused}  # torch makes none of unused
    if "centered" not in optimizer:
        assert roles["momentum"] == state and (optimizer or roles["variance"] == state)
        assert module.report["planned_roles"]["momentum"] == expected
    assert roles["compute_grads"] == {"dram": weights - block - unused, "cxl": block}
    assert module.report["peak_roles"]["activations"]["cxl"] > 0
    assert set(tiers) == {"dram", "cxl"}
    for tier in tiers.values():
        assert tier["budget_bytes"] <= tier["capacity_bytes"] and tier["used_bytes"] <= tier["peak_bytes"]
    for name, where in [*module.weights.items(), *module.grads.items(), *module.state.items()]:
        assert set(where) == {"cxl" if name.startswith("model.blocks.1.") else "dram"}, f"the kernel says so of {name}"


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


class MomentumFar:
    """A user's own policy: momentum on the last tier, the rest on the first."""

    needs_speeds = False

    def decide(self, job, machine):
        far = {TensorRole.MOMENTUM: {machine.names[-1]: 1.0}}
        return Decision({role: far.get(role, {machine.names[0]: 1.0}) for role in job.free_classes()}, {})


SPEEDS = """
tiers:
  - {name: dram, adam_bytes_per_s: 200e9, device_read_bytes_per_s: 200e9, device_write_bytes_per_s: 200e9}
  - {name: cxl, adam_bytes_per_s: 100e9, device_read_bytes_per_s: 100e9, device_write_bytes_per_s: 100e9}
"""


def test_a_users_own_policy_decides_and_losses_do_not_depend_on_the_policy(tmp_path):
    (tmp_path / "machine.yaml").write_text(SPEEDS)
    with pytest.raises(ConfigError, match="'bandwidth' needs the speeds of all tiers"):
        run(offload(policy="bandwidth", tiers={"cxl": "2GiB"}))
    plain = run("cxl_offload").losses
    for policy in (*POLICIES, f"{__name__}.MomentumFar"):
        module = run(offload(policy=policy, tiers={"cxl": "2GiB"}, machine=str(tmp_path / "machine.yaml")))
        assert (module.losses, module.report["policy"]) == (plain, policy)
    weights = sum(p.numel() * 4 for p in module.parameters())
    assert module.report["roles"]["momentum"] == {"cxl": weights}
    assert module.report["roles"]["variance"] == module.report["roles"]["compute_weights"] == {"dram": weights}
