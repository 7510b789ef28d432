"""Checkpoints that refer to optimizer state on SSD, or have it; and what a run with such state must not get wrong."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_cxl.errors import CheckpointError, ConfigError, StorageError, UnsupportedError
from lightning_cxl.integrations.lightning import CXLCheckpointIO
from lightning_cxl.optim.swapped_state import StateSwapper
from tests.integration import test_ssd_training as ssd_training
from tests.integration.llama import LlamaInStep, tiny_llama
from tests.integration.test_ssd_training import STATE
from tests.integration.training import assert_same_weights, run
from tests.storage_cases import damage

REFERENCE = {"ssd": {"checkpoint": "reference"}}
WEIGHTS = {"tier_rules": {"*": {"weights": "ssd"}}, "stream_weights": True}


def on_ssd(folder: Path, **options):
    return ssd_training.on_ssd(folder, STATE, **{"stream_weights": "auto", **options})


def bfloat16_llama():
    return tiny_llama().to(torch.bfloat16)


def fit(strategy, steps, *, make_model=bfloat16_llama, task=LlamaInStep, callbacks=(), **given):
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    given |= {"callbacks": [*callbacks], "enable_checkpointing": saves}
    return run(strategy, lambda: task(make_model()), steps, **given)[0]


def every_step(folder, **options):
    return ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, save_last=False, monitor=None, **options)


def test_a_run_with_weights_there_resumes_exactly_from_copies(tmp_path):
    options = {"tier_rules": ssd_training.BOTH, "stream_weights": True, "ssd": {"checkpoint": "copy"}}
    straight = fit({}, 7)
    first = fit(on_ssd(tmp_path / "ssd", **options), 4, callbacks=[every_step(tmp_path)])
    second = fit(on_ssd(tmp_path / "ssd", **options), 7, ckpt_path=next(tmp_path.glob("*.ckpt")))
    assert first.losses + second.losses == straight.losses
    assert_same_weights(second, straight)


def test_only_the_latest_checkpoint_of_a_run_can_be_loaded(tmp_path):
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    fit(on_ssd(tmp_path / "ssd", **REFERENCE), 4, callbacks=[callback])
    early = next(tmp_path.glob("*step=2*"))
    with pytest.raises(CheckpointError, match=r"generation 1 in .* gone: that folder holds 2"):
        fit(on_ssd(tmp_path / "ssd", **REFERENCE), 5, ckpt_path=early)


def test_a_run_without_the_state_refuses_a_checkpoint_that_refers_to_it(tmp_path):
    fit(on_ssd(tmp_path / "ssd", **REFERENCE), 2, callbacks=[every_step(tmp_path)])
    saved = next(tmp_path.glob("*.ckpt"))
    with pytest.raises(CheckpointError, match=r"this run keeps state on SSD in none.*plain_checkpoint"):
        fit({}, 3, ckpt_path=saved)
    with pytest.raises(CheckpointError, match=r"keeps state on SSD in `.*other`"):
        fit(on_ssd(tmp_path / "other", **REFERENCE), 3, ckpt_path=saved)
    with pytest.raises(ConfigError, match="bytes and not"):
        fit(on_ssd(tmp_path / "ssd", **REFERENCE), 3, make_model=lambda: tiny_llama(hidden_size=64).to(torch.bfloat16))


class TwoOptimizers(LlamaInStep):
    """Steps two optimizers itself, and keeps references to them."""

    automatic_optimization = False

    def configure_optimizers(self):
        parameters = list(self.model.parameters())
        self.mine = [torch.optim.AdamW(half) for half in (parameters[:3], parameters[3:])]
        return self.mine

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss([each.to(self.device) for each in batch]))
        for optimizer in self.optimizers():
            optimizer.step()


@pytest.mark.parametrize("after_error", [False, True])
def test_a_drive_that_fails_at_the_end_leaves_the_users_optimizers(tmp_path, monkeypatch, caplog, after_error):
    module, wait = TwoOptimizers(bfloat16_llama()), StateSwapper.wait

    def cannot_write(state):
        wait(state)
        raise StorageError("cannot write")

    def end_of_step(*_):
        monkeypatch.setattr(StateSwapper, "wait", cannot_write)
        if after_error:
            raise RuntimeError("the user's")

    module.on_train_batch_end = end_of_step
    error, text = (RuntimeError, "the user's") if after_error else (StorageError, "cannot write")
    with pytest.raises(error, match=text):
        run(on_ssd(tmp_path / "ssd", master="fp32"), module, 2)
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in module.mine:
        assert "step" not in vars(optimizer) and not optimizer.state, "what could not be written is lost"
        assert {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} <= own
    assert not after_error or "the error that ended the run was not the only one: cannot write" in caplog.text


@pytest.mark.parametrize(
    ("options", "plugin"),
    [({}, None), ({}, TorchCheckpointIO), (WEIGHTS, None), ({**WEIGHTS, **REFERENCE}, None)],
    ids=["state", "state, by another plug-in", "weights", "weights beside state that is referred to"],
)
def test_what_is_damaged_is_not_copied_into_a_checkpoint(tmp_path, options, plugin):
    def damages(trainer, *_):
        """Flip a bit of every block of the data file, behind the run's back, and save."""
        trainer.optimizers[0].state  # noqa: B018 - waits for the writes
        damage(tmp_path / "ssd")
        trainer.save_checkpoint(tmp_path / "it.ckpt")

    strategy = on_ssd(tmp_path / "ssd", **options, **({} if plugin is None else {"checkpoint_io": plugin()}))
    with pytest.raises(StorageError, match="is damaged"):
        fit(strategy, 2, callbacks=[LambdaCallback(on_train_batch_end=damages)])
    assert not (tmp_path / "it.ckpt").exists()


def test_state_of_a_run_that_is_over_is_not_overwritten_while_it_is_taken_over(tmp_path):
    module = LlamaInStep(bfloat16_llama())
    configured = module.configure_optimizers()
    module.configure_optimizers = lambda: configured
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1)
    options = {"callbacks": [saves], "enable_checkpointing": True}
    run(on_ssd(tmp_path / "ssd", **REFERENCE), module, 3, **options)
    with pytest.raises(UnsupportedError, match="state of an earlier run"):
        run(on_ssd(tmp_path / "ssd", **REFERENCE), module, 5, **options)


def test_checkpoints_that_are_written_later_cannot_refer(tmp_path):
    strategy = on_ssd(tmp_path / "ssd", **REFERENCE)
    strategy.checkpoint_io = AsyncCheckpointIO(CXLCheckpointIO())
    with pytest.raises(ConfigError, match="AsyncCheckpointIO may write later"):
        fit(strategy, 1)
