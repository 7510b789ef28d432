"""What a run leaves behind for the Trainer: masters for a checkpoint, a report, and nothing else."""

import gc
import weakref

import pytest
import torch

from lightning_cxl.run.run import Run
from lightning_cxl.run.state_on_ssd import KEY
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

pytestmark = pytest.mark.on_cpu


class Sgd(Task):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_masters_of_a_run_are_gone_while_the_next_one_trains():
    alive = []

    class Looking(Sgd):
        def on_train_start(self):
            gc.collect()
            alive.append(sum(each() is not None for each in masters))

    masters: list = []
    strategy = offload()
    trainer = make_trainer(strategy, max_steps=1, precision="bf16-true")
    module = Looking(TinyTransformer())
    trainer.fit(module, token_data())
    masters = [weakref.ref(pair.master) for pair in strategy._session._finished.masters if not pair.is_shared]
    assert masters
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module, token_data())
    assert alive[-1] == 0


def test_a_checkpoint_after_a_teardown_that_raised_has_the_masters_of_that_run(tmp_path, monkeypatch):
    def close(self, **options):
        plain(self, **options)
        raise RuntimeError("the last update has failed")

    plain = Run.close
    strategy = offload()
    trainer = make_trainer(strategy, max_steps=1, precision="bf16-true")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "close", close)
        with pytest.raises(RuntimeError, match="the last update has failed"):
            trainer.fit(Sgd(TinyTransformer()), token_data())
    assert strategy.report()["state"] == "finished"
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    own = torch.load(tmp_path / "after.ckpt", weights_only=True)[KEY]
    assert own["master_weights"].keys() == {name for name, _ in trainer.lightning_module.named_parameters()}
