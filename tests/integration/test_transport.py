"""Copies and pickles of what knows the Trainer, during a run and after it: they leave the run itself behind."""

import copy
import io
import pickle

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.plugins import MixedPrecision

from tests.cases import every_value
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = (copy.deepcopy, through_pickle, through_file)


class Plain(Task):
    """Without a lambda in its scheduler, which does not travel with plain Lightning either."""

    def __init__(self, model):
        super().__init__(model, scheduler=False)


class Travels(Callback):
    """Copies what a callback can reach; a copy of it does not copy again."""

    def __init__(self, way, when):
        self.way, self.when, self.copies = way, when, []

    def __getstate__(self):
        return {"way": self.way, "when": "never", "copies": []}

    def _travel(self, trainer, when):
        if when == self.when and not self.copies:
            self.copies = [self.way(trainer), self.way(trainer.callbacks), self.way(trainer.lightning_module)]
            self.weights = {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}

    def on_fit_start(self, trainer, pl_module):
        self._travel(trainer, "on_fit_start")

    def on_train_batch_end(self, trainer, *_):
        self._travel(trainer, "on_train_batch_end")

    def on_train_end(self, trainer, pl_module):
        self._travel(trainer, "on_train_end")


def fit(strategy, callbacks, **trainer_args):
    seed_everything(3, verbose=False)
    module = Plain(TinyTransformer(dropout=0.0))
    trainer = make_trainer(strategy, max_steps=3, callbacks=callbacks, **trainer_args)
    trainer.fit(module, token_data())
    return module, trainer


def works(trainer):
    """A run of a Trainer that came through a copy."""
    trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 2
    before = trainer.lightning_module.model.head.weight.detach().cpu().clone()
    trainer.fit(trainer.lightning_module, token_data())
    return not torch.equal(trainer.lightning_module.model.head.weight.detach().cpu(), before)


WHEN = ("on_fit_start", "on_train_batch_end", "on_train_end")


@pytest.mark.parametrize(("way", "when", "precision"), every_value(WAYS, WHEN, ("32-true", "bf16-true")))
def test_copies_made_during_a_run_have_its_weights_and_can_train(way, when, precision):
    callback = Travels(way, when)
    straight, _ = fit("cxl_offload", [], precision=precision)
    module, _ = fit("cxl_offload", [callback], precision=precision)
    assert module.losses == straight.losses, "the run goes on undisturbed"
    trainer, callbacks, alone = callback.copies
    assert [type(one) for one in callbacks] == [Travels]
    for copied in (trainer.lightning_module, alone):
        for name, value in callback.weights.items():
            assert torch.equal(copied.state_dict()[name], value), name
        kinds = {type(value).__module__ for part in copied.model.modules() for value in vars(part).values()}
        assert not [kind for kind in kinds if kind.startswith("lightning_cxl")]
    assert trainer.strategy._session.run is None
    assert works(trainer)


@pytest.mark.on_cpu
@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle])
def test_precision_plugins_travel_with_methods_of_their_own(way):
    """A run puts clipping and unscaling of its own into them."""
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    callback = Travels(way, "on_train_batch_end")
    fit(offload(), [callback], plugins=[plugin], gradient_clip_val=0.5)
    copied = callback.copies[0].strategy.precision_plugin
    assert copied is not plugin and copied.scaler is not plugin.scaler
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 8.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    copied.scaler.scale(torch.ones(()))
    copied.scaler.unscale_(optimizer)
    assert torch.equal(parameter.grad, torch.full((4,), 2.0))
    copied.clip_grad_by_norm(optimizer, 1.0)
    assert parameter.grad.norm() == pytest.approx(1.0, rel=1e-4)
