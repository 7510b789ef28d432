"""Lightning as users know it: precisions, loops without fit, hooks, callbacks, refusals, registration."""

import json

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.cli import LightningCLI
from torch import nn

import lightning_cxl
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

pytestmark = pytest.mark.on_cpu


def test_validate_test_and_predict_without_fit():
    module = Task(TinyTransformer())
    trainer = make_trainer("cxl_offload")
    plain = make_trainer("auto")
    assert trainer.validate(module, token_data(), verbose=False) == plain.validate(module, token_data(), verbose=False)
    assert trainer.test(module, token_data(), verbose=False) == plain.test(module, token_data(), verbose=False)
    ours, theirs = trainer.predict(module, token_data()), plain.predict(module, token_data())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_one_trainer_for_fit_validate_and_fit_again(tmp_path):
    module = Task(TinyTransformer())
    trainer = make_trainer("cxl_offload", max_steps=2)
    trainer.fit(module, token_data())
    before = trainer.validate(module, token_data(), verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, token_data())
    assert len(module.losses) == 4
    assert trainer.validate(module, token_data(), verbose=False) != before


def test_unsupported_adam_options_name_the_way_out():
    for option in ("amsgrad", "maximize"):
        module = Task(TinyTransformer(), **{option: True})
        with pytest.raises(lightning_cxl.UnsupportedError, match=f"{option}.*cpu_adam=False"):
            make_trainer("cxl_offload", max_steps=1).fit(module, token_data())
        module = Task(TinyTransformer(), **{option: True})
        make_trainer(offload(cpu_adam=False), max_steps=1).fit(module, token_data())


def test_subclass_of_adamw_is_left_alone():
    class Mine(torch.optim.AdamW):
        pass

    class Uses(Task):
        def configure_optimizers(self):
            return Mine(self.parameters(), lr=1e-3)

    trainer = make_trainer("cxl_offload", max_steps=2)
    trainer.fit(Uses(TinyTransformer()), token_data())
    assert type(trainer.optimizers[0]) is Mine


def test_float64_parameters_train_with_torchs_adam():
    class Double(Task):
        def loss(self, batch):
            return nn.functional.cross_entropy(self.model(batch[0]).flatten(0, -2), batch[1].flatten())

    results = []
    for strategy in ("auto", "cxl_offload"):
        seed_everything(4, verbose=False)
        module = Double(TinyTransformer(dropout=0.0).double())
        make_trainer(strategy, max_steps=4, precision="64-true").fit(module, token_data())
        results.append(module.losses)
    assert results[0] == results[1]


def test_print_and_report():
    trainer = make_trainer(offload(tiers={"cxl": "1GiB"}), max_steps=2)
    assert "not set up" in str(trainer.strategy)
    trainer.fit(Task(TinyTransformer()), token_data())
    text = str(trainer.strategy)
    for word in ("dram", "cxl", "momentum", "planned", "peak", "CPUAdam", "blocks"):
        assert word in text
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 120
    report = json.loads(json.dumps(trainer.strategy.report()))
    assert {"capacity_bytes", "budget_bytes", "used_bytes", "peak_bytes"} <= report["tiers"]["dram"].keys()
    assert report["peak_roles"]["momentum"]["dram"] > 0
    assert repr(offload(num_threads=3)) == "CXLOffloadStrategy(num_threads=3)"


@pytest.mark.parametrize(
    "strategy",
    [
        "strategy: cxl_offload",
        "strategy:\n    class_path: lightning_cxl.CXLOffloadStrategy\n    init_args:\n"
        "      tiers: {dram: 1GiB}\n      tier_rules: {'model.blocks.*': {activations: cxl}}\n      num_threads: 1",
    ],
)
def test_lightning_cli_yaml(tmp_path, monkeypatch, strategy):
    pytest.importorskip("jsonargparse")

    class Cli(LightningModule):
        def __init__(self, width: int = 32):
            super().__init__()
            self.model = TinyTransformer(width=width)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

        def train_dataloader(self):
            return token_data()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    config = tmp_path / "config.yaml"
    config.write_text(
        f"seed_everything: 1\ntrainer:\n  {strategy}\n  accelerator: cpu\n  max_steps: 2\n  logger: false\n"
        "  enable_checkpointing: false\n  enable_progress_bar: false\n"
    )
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--config", str(config)])
    cli = LightningCLI(Cli, save_config_callback=None)
    chosen = cli.trainer.strategy
    assert isinstance(chosen, lightning_cxl.CXLOffloadStrategy) and cli.trainer.global_step == 2
    if "init_args" in strategy:
        assert chosen.config.budgets() == {"dram": 1 << 30} and chosen.config.num_threads == 1
        assert chosen.report()["tiers"]["dram"]["budget_bytes"] == 1 << 30
