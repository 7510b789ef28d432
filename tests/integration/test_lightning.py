"""Lightning as users know it: loops without fit, modules without parameters, YAML, copies of a Trainer, schedulers."""

import copy
import json
import pickle
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LightningCLI

from tests.cases import every_value
from tests.integration.training import assert_equal, make_trainer, run
from tests.models import Task, TinyTransformer, no_dropout, token_data

on_cpu = pytest.mark.on_cpu


class Baseline(LightningModule):
    """Guesses the same token always: a metric, or a tokenizer in the shape of a model; has a buffer at most."""

    def __init__(self, *, buffer):
        super().__init__()
        self.register_buffer("guess", torch.tensor(3)) if buffer else setattr(self, "guess", 3)

    def validation_step(self, batch, batch_idx):
        self.log("hits", (batch[1] == self.guess).float().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return torch.full_like(batch[1], int(self.guess))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Task(TinyTransformer()), {}),
        *((partial(Baseline, buffer=buffer), {"policy": "interleave"}) for buffer in (False, True)),
    ],
)
def test_validate_test_and_predict_without_fit(make, options):
    module, ours, plain = make(), make_trainer(options), make_trainer()
    for verb in ("validate", "test"):
        found = getattr(ours, verb)(module, token_data(), verbose=False)
        assert found == getattr(plain, verb)(module, token_data(), verbose=False) != [{}]
    predicted, expected = ours.predict(module, token_data()), plain.predict(module, token_data())
    assert len(predicted) == len(expected) > 0 and all(map(torch.equal, predicted, expected))
    assert ours.strategy.report()["num_parameters"] == sum(p.numel() for p in module.parameters())


def test_float64_parameters_train_with_torchs_adam():
    class Double(Task):
        def loss(self, batch):
            return torch.nn.functional.cross_entropy(self.model(batch[0]).flatten(0, -2), batch[1].flatten())

    plain, ours = (run(each, lambda: Double(no_dropout().double()), 4, precision="64-true")[0] for each in ("auto", {}))
    assert ours.losses == plain.losses


@on_cpu
def test_lightning_cli_yaml(tmp_path, monkeypatch):
    pytest.importorskip("jsonargparse")

    class Cli(Task):
        def __init__(self):
            super().__init__(no_dropout())

        def train_dataloader(self):
            return token_data()

    options = {"tiers": {"dram": "1GiB"}, "tier_rules": {"model.blocks.*": {"activations": "cxl"}}, "num_threads": 1}
    strategy = {"class_path": "lightning_cxl.CXLOffloadStrategy", "init_args": options}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    config = {"seed_everything": 1, "trainer": {"strategy": strategy, "accelerator": "cpu", "max_steps": 2, **quiet}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--config", str(tmp_path / "config.yaml")])
    trainer = LightningCLI(Cli, save_config_callback=None).trainer
    assert trainer.global_step == 2 and trainer.strategy.config.num_threads == 1
    assert trainer.strategy.report()["tiers"]["dram"]["budget_bytes"] == 1 << 30


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


class Travels(Callback):
    """Copies what a callback can reach, in one of its hooks; a copy of it does not copy again."""

    def __init__(self, way, when):
        self.way, self.copies = way, []
        setattr(self, when, self._travel)

    def __getstate__(self):
        return {"copies": []}

    def _travel(self, trainer, module, *_):
        if not self.copies:
            self.copies = [self.way(trainer), self.way(trainer.callbacks), self.way(module)]
            self.weights = {name: value.clone() for name, value in module.state_dict().items()}


def fit(callbacks, **given):
    """Without a lambda in its scheduler, which does not travel with plain Lightning either."""
    return run({}, lambda: Task(no_dropout(), scheduler=False), 3, callbacks=callbacks, **given)


WHEN = ("on_fit_start", "on_train_batch_end", "on_train_end")


@pytest.mark.parametrize(
    ("way", "when", "precision"), every_value((copy.deepcopy, through_pickle), WHEN, ("32-true", "bf16-true"))
)
def test_copies_made_during_a_run_have_its_weights_and_can_train(way, when, precision):
    callback = Travels(way, when)
    straight, module = (fit(each, precision=precision)[0] for each in ([], [callback]))
    assert module.losses == straight.losses, "the run goes on undisturbed"
    trainer, callbacks, alone = callback.copies
    assert [type(one) for one in callbacks] == [Travels]
    for copied in (trainer.lightning_module, alone):
        assert_equal(dict(copied.state_dict()), callback.weights)
        kinds = {type(value).__module__ for part in copied.model.modules() for value in vars(part).values()}
        assert not [kind for kind in kinds if kind.startswith("lightning_cxl")]
    assert trainer.strategy._session.run is None
    copied, trainer.fit_loop.epoch_loop.max_steps = trainer.lightning_module, trainer.global_step + 2
    before = copied.model.head.weight.detach().cpu().clone()
    trainer.fit(copied, token_data())
    assert not torch.equal(copied.model.head.weight.detach().cpu(), before)


class SharpnessAware(Task):
    """Two forwards in a step, the second with weights that were moved in the optimizer."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for by in (0.5, -0.5):
            loss = self.loss(batch)
            self.record(loss)
            self.manual_backward(loss)
            moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if by > 0:
                ascent = [p.grad.clone() for p in moved]
            for p, each in zip(moved, ascent, strict=True):
                torch.no_grad()(p.add_)(each, alpha=by)
            if by < 0:
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("options", [{"stream_weights": True}, {}], ids=str)
def test_weights_that_are_moved_in_the_optimizer_within_a_step_are_those_of_the_next_forward(options):
    plain, ours = (run(each, lambda: SharpnessAware(no_dropout()), 4)[0] for each in ("auto", options))
    assert len(set(plain.losses)) == 8
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert not any(each._forward_pre_hooks for each in ours.modules())
