"""Where bytes are after the strategy placed them: asked from the kernel, and from the accounts."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

import lightning_cxl
from lightning_cxl import ConfigError, residency
from tests.integration.llama import LlamaTask, tiny_llama
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
                key: residency(value)
                for state in optimizer.state.values()
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and value.dim()
            }


def run(strategy, model=None, steps=2, optimizer="adamw", **optimizer_args):
    if optimizer == "adamw":
        optimizer_args.pop("momentum", None)
    module = Inspect(model or TinyTransformer(), optimizer, **optimizer_args)
    make_trainer(strategy, max_steps=steps).fit(module, token_data())
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
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name


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

    class Late(LightningModule):
        def configure_model(self):
            if not hasattr(self, "layer"):
                self.layer = Decorated(32, 0.0)
                self.plain = nn.Linear(32, 37)
                seen["decorated"] = residency(self.layer.qkv.weight)
                seen["plain"] = residency(self.plain.weight)

        def training_step(self, batch, batch_idx):
            x = nn.functional.one_hot(batch[0] % 32, 32).float()
            return nn.functional.cross_entropy(self.plain(self.layer(x)).flatten(0, 1), batch[1].flatten())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    trainer = make_trainer("cxl_offload", max_steps=1)
    module = Late()
    trainer.fit(module, token_data())
    assert seen["decorated"] == {"cxl": 32 * 96 * 4} and seen["plain"] == {"dram": 32 * 37 * 4}
    # afterwards the run's memory is closed: an emulated tier goes by its real name
    assert residency(module.layer.qkv.weight) == {"dram": 32 * 96 * 4}

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
    class Views(TinyTransformer):
        def __init__(self):
            super().__init__()
            both = torch.randn(2, 32)
            self.norm.weight = nn.Parameter(both[0])
            self.norm.bias = nn.Parameter(both[1])

    model = Views()
    module = run("cxl_offload", model)
    assert model.norm.weight.untyped_storage().data_ptr() == model.norm.bias.untyped_storage().data_ptr()
    assert any("shared storage" in note for note in module.report["notes"])


def test_zero_size_parameters_train():
    class WithEmpty(TinyTransformer):
        def __init__(self):
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0, 32))

        def forward(self, tokens):
            return super().forward(tokens) + self.nothing.sum()

    module = run("cxl_offload", WithEmpty())
    assert module.model.nothing.shape == (0, 32)


class MadeLate(LlamaTask):
    """A model with tied or own weights in its head, made in `configure_model`."""

    def __init__(self, tied):
        super().__init__(None)
        self.tied = tied

    def configure_model(self):
        if self.model is None:
            self.model = tiny_llama(vocab_size=4000, tie_word_embeddings=self.tied)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_made_in_configure_model_take_what_was_planned(tied):
    trainer = make_trainer(offload(), max_steps=1)
    trainer.fit(MadeLate(tied), token_data())
    report = trainer.strategy.report()
    planned, peak = (sum(report[f"{kind}_roles"]["compute_weights"].values()) for kind in ("planned", "peak"))
    assert planned == pytest.approx(peak, rel=1e-3), "tied weights were placed twice for a moment"
