"""Optimizer state on SSD: training is that of state in memory, bit for bit, on every device and in every precision."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import lightning_cxl
from lightning_cxl.errors import CheckpointError, ConfigError, StorageError, UnsupportedError
from lightning_cxl.integrations.lightning.common import CXLCheckpointIO
from lightning_cxl.optim.swapped_state import StateSwapper
from tests.cases import every_pair
from tests.integration.llama import LlamaInStep, LlamaTask, tiny_llama
from tests.integration.training import assert_identical as assert_same
from tests.integration.training import make_trainer, offload, train
from tests.models import token_data
from tests.storage_cases import damage

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
]

RULE = {"*": {"optimizer_state": "ssd"}}
STEPS = 6


def on_ssd(folder: Path, **options):
    ssd = {"path": str(folder), "budget": "64MiB", **options.pop("ssd", {})}
    return offload(tiers={"ssd": ssd, **options.pop("tiers", {})}, **{"tier_rules": RULE, **options})


def both(tmp_path, make_model=tiny_llama, **options):
    given = {key: options.pop(key) for key in ("optimizer", "optimizer_args", "trainer_args") if key in options}
    strategy = on_ssd(tmp_path / "ssd", **options)
    ours = train(make_model, strategy, steps=STEPS, task=LlamaTask, **given)
    theirs = train(make_model, offload(**options), steps=STEPS, task=LlamaTask, **given)
    return strategy, ours, theirs


@pytest.mark.parametrize(
    ("state", "dtype", "overlap"), every_pair(["fp32", "bf16", "8bit"], [torch.float32, torch.bfloat16], [False, True])
)
def test_training_is_that_of_state_in_memory(tmp_path, state, dtype, overlap):
    def make_model():
        return tiny_llama(hidden_size=64, intermediate_size=128).to(dtype)

    strategy, ours, theirs = both(
        tmp_path, make_model, state=state, stream_weights=overlap, overlap_step=overlap, on_overflow="ignore"
    )
    assert_same(ours, theirs)
    roles = strategy.report()["peak_roles"]
    assert not {"momentum", "variance"} & roles.keys(), "state was in memory"
    assert strategy.report()["tiers"]["ssd"]["peak_bytes"] > 0
    assert os.listdir(tmp_path / "ssd") == ["lightning_cxl.lock"]


# -- checkpoints that refer to the state ------------------------------------------------------------------------------

REFERENCE = {"ssd": {"checkpoint": "reference"}}
WEIGHTS = {"tier_rules": {"*": {"weights": "ssd"}}, "stream_weights": True}


def bfloat16_llama():
    return tiny_llama().to(torch.bfloat16)


def fit(strategy, steps, *, make_model=bfloat16_llama, task=LlamaInStep, ckpt_path=None, save=None, callbacks=()):
    seed_everything(11, verbose=False)
    module = task(make_model())
    saves = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    trainer = make_trainer(strategy, max_steps=steps, callbacks=[*callbacks], enable_checkpointing=saves)
    trainer.fit(module, token_data(), ckpt_path=ckpt_path)
    if save:
        trainer.save_checkpoint(save)
    return module


def every_step(folder, **options):
    return ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, save_last=False, monitor=None, **options)


def weights(module):
    return {name: value.cpu().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("checkpoint", "state"), [("copy", "8bit"), ("reference", "fp32"), ("reference", "8bit")])
def test_a_run_resumes_exactly(tmp_path, checkpoint, state):
    options = {"ssd": {"checkpoint": checkpoint}, "state": state}
    straight = fit(offload(state=state), 7)
    first = fit(on_ssd(tmp_path / "ssd", **options), 4, callbacks=[every_step(tmp_path)])
    saved = next(tmp_path.glob("*.ckpt"))
    second = fit(on_ssd(tmp_path / "ssd", **options), 7, ckpt_path=saved)
    assert first.losses + second.losses == straight.losses
    assert_same(([0], weights(second)), ([0], weights(straight)))


def test_a_checkpoint_that_refers_becomes_a_whole_one(tmp_path):
    fit(on_ssd(tmp_path / "ssd", **REFERENCE), 3, callbacks=[every_step(tmp_path)])
    fit(on_ssd(tmp_path / "other"), 3, callbacks=[every_step(tmp_path / "copy")])
    plain, copied = (
        lightning_cxl.plain_checkpoint(torch.load(next(folder.glob("*.ckpt")), weights_only=True, map_location="cpu"))
        for folder in (tmp_path, tmp_path / "copy")
    )
    for key, entry in copied["optimizer_states"][0]["state"].items():
        for name, value in entry.items():
            assert torch.equal(plain["optimizer_states"][0]["state"][key][name], value), (key, name)
    assert_same(([0], plain["state_dict"]), ([0], copied["state_dict"]))


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
        fit(offload(), 3, ckpt_path=saved)
    with pytest.raises(CheckpointError, match=r"keeps state on SSD in `.*other`"):
        fit(on_ssd(tmp_path / "other", **REFERENCE), 3, ckpt_path=saved)
    with pytest.raises(ConfigError, match="bytes and not"):
        fit(on_ssd(tmp_path / "ssd", **REFERENCE), 3, make_model=lambda: tiny_llama(hidden_size=64).to(torch.bfloat16))


class JoinsLater(Callback):
    """Trains the head from the third step on, as callbacks for gradual unfreezing do."""

    def __init__(self):
        self.joined = False

    def on_fit_start(self, trainer, module):
        if self.joined:
            self.join(trainer, module)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 2 and not self.joined:
            self.join(trainer, module)

    def join(self, trainer, module):
        self.joined = True
        trainer.optimizers[0].add_param_group({"params": [module.late]})

    def state_dict(self):
        return {"joined": self.joined}

    def load_state_dict(self, state_dict):
        self.joined = state_dict["joined"]


class WithLatecomer(LlamaInStep):
    """Has a parameter that no optimizer gets at first."""

    def __init__(self, model):
        super().__init__(model)
        self.late = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))

    def loss(self, batch):
        return super().loss(batch) * self.late.float().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)


@pytest.mark.parametrize("saved_after", [1, 4])
def test_a_parameter_that_joins_gets_a_record_of_its_own(tmp_path, saved_after):
    def resumed(make_strategy, folder):
        callbacks = [JoinsLater(), every_step(folder)]
        first = fit(make_strategy(), saved_after, callbacks=callbacks, task=WithLatecomer)
        callbacks = [JoinsLater(), every_step(folder)]
        saved = next(folder.glob("*.ckpt"))
        second = fit(make_strategy(), 6, ckpt_path=saved, callbacks=callbacks, task=WithLatecomer)
        return first.losses + second.losses, weights(second)

    ours = resumed(lambda: on_ssd(tmp_path / "ssd", **REFERENCE), tmp_path / "ours")
    assert_same(ours, resumed(offload, tmp_path / "theirs"))


class SavesAndGoesOn(Callback):
    """Saves after every step, and goes on where that fails, as a user's own callback may."""

    def __init__(self, folder):
        self.folder = folder
        self.num_failed = 0

    def on_train_batch_end(self, trainer, module, *args):
        try:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")
        except OSError:
            self.num_failed += 1


def test_training_goes_on_after_a_checkpoint_that_could_not_be_written(tmp_path, monkeypatch):
    straight = fit(offload(), 6)
    save = CXLCheckpointIO.save_checkpoint

    def some_fail(io, checkpoint, path, storage_options=None):
        if checkpoint["global_step"] in (2, 3, 5):
            raise OSError(28, "No space left on device")
        save(io, checkpoint, path, storage_options)

    monkeypatch.setattr(CXLCheckpointIO, "save_checkpoint", some_fail)
    callback = SavesAndGoesOn(tmp_path)
    ours = fit(on_ssd(tmp_path / "ssd", **REFERENCE), 5, callbacks=[callback])
    assert callback.num_failed == 3
    again = fit(on_ssd(tmp_path / "ssd", **REFERENCE), 6, ckpt_path=tmp_path / "4.ckpt")
    assert ours.losses == straight.losses[:5] and again.losses == straight.losses[4:]


class TwoOptimizers(LlamaInStep):
    """Steps two optimizers itself, and keeps references to them."""

    def __init__(self, model):
        super().__init__(model)
        self.automatic_optimization = False

    def configure_optimizers(self):
        parameters = list(self.model.parameters())
        self.mine = [torch.optim.AdamW(half) for half in (parameters[:3], parameters[3:])]
        return self.mine

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss([each.to(self.device) for each in batch]))
        for optimizer in self.optimizers():
            optimizer.step()


class DriveFails(Callback):
    """Lets all writes fail from the end of a step on."""

    def __init__(self, monkeypatch, ends_run):
        self.monkeypatch, self.ends_run = monkeypatch, ends_run

    def on_train_batch_end(self, *_):
        wait = StateSwapper.wait

        def fail(state):
            wait(state)
            raise StorageError("cannot write")

        self.monkeypatch.setattr(StateSwapper, "wait", fail)
        if self.ends_run:
            raise RuntimeError("the user's")


@pytest.mark.parametrize("after_error", [False, True])
def test_a_drive_that_fails_at_the_end_leaves_the_users_optimizers(tmp_path, monkeypatch, caplog, after_error):
    modules = []

    def task(model):
        modules.append(TwoOptimizers(model))
        return modules[0]

    callbacks = [DriveFails(monkeypatch, after_error)]
    expected = (RuntimeError, "the user's") if after_error else (StorageError, "cannot write")
    with pytest.raises(expected[0], match=expected[1]):
        fit(on_ssd(tmp_path / "ssd", master="fp32"), 2, task=task, callbacks=callbacks)
    own = {id(parameter) for parameter in modules[0].parameters()}
    for optimizer in modules[0].mine:
        assert "step" not in vars(optimizer) and {id(key) for key in optimizer.state} <= own
        assert {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} <= own
        assert not optimizer.state, "what could not be written is lost"
    assert not after_error or "the error that ended the run was not the only one: cannot write" in caplog.text


# -- what a run must not get wrong ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_backward", [True, False])
def test_residents_and_units_are_updated_at_the_same_time(tmp_path, in_backward):
    """Two threads update records: the worker those of units, the step those of what stays on the device."""

    def make_model():
        return tiny_llama(num_layers=6, hidden_size=128, intermediate_size=256)

    options = {"stream_weights": True, "overlap_step": True, "on_overflow": "ignore" if in_backward else "skip"}
    for attempt in range(1 if in_backward else 2):
        ours = train(make_model, on_ssd(tmp_path / f"ssd{attempt}", **options), steps=12, task=LlamaTask)
        assert_same(ours, train(make_model, offload(**options), steps=12, task=LlamaTask))


class UsesState(Callback):
    """Writes to optimizer state while it is saved."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, *args):
        trainer.save_checkpoint(self.path)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        for entry in trainer.optimizers[0].state.values():
            entry["exp_avg"].zero_()


@pytest.mark.parametrize("checkpoint", ["copy", "reference"])
def test_state_on_ssd_is_not_written_in_passing(tmp_path, checkpoint):
    with pytest.raises(UnsupportedError, match=r"lies on tier `ssd`.*state_dict\(\)` reads it"):
        fit(on_ssd(tmp_path / "ssd", ssd={"checkpoint": checkpoint}), 2, callbacks=[UsesState(tmp_path / "it.ckpt")])


class LoadsState(Callback):
    """Reads and writes state between steps, as a callback may."""

    def on_train_batch_end(self, trainer, module, *args):
        optimizer = trainer.optimizers[0]
        saved = optimizer.state_dict()
        for entry in saved["state"].values():
            entry["exp_avg"].mul_(0.5)
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("checkpoint", ["copy", "reference"])
def test_state_is_read_and_written_as_a_state_dict_in_a_run(tmp_path, checkpoint):
    options = {"make_model": lambda: tiny_llama(), "callbacks": [LoadsState()]}
    ours = fit(on_ssd(tmp_path / "ssd", ssd={"checkpoint": checkpoint}), 4, **options)
    theirs = fit(offload(), 4, **options)
    assert_same((ours.losses, weights(ours)), (theirs.losses, weights(theirs)))


class DamagesTheDrive(Callback):
    """Flips a bit of every block of the data file, behind the run's back, and saves."""

    def __init__(self, folder, path, **how):
        self.folder, self.path, self.how = folder, path, how

    def on_train_batch_end(self, trainer, module, *args):
        trainer.optimizers[0].state  # noqa: B018 - waits for the writes
        damage(self.folder)
        trainer.save_checkpoint(self.path, **self.how)


@pytest.mark.parametrize(
    ("options", "plugin"),
    [({}, None), ({}, TorchCheckpointIO), (WEIGHTS, None), ({**WEIGHTS, **REFERENCE}, None)],
    ids=["state", "state, by another plug-in", "weights", "weights beside state that is referred to"],
)
def test_what_is_damaged_is_not_copied_into_a_checkpoint(tmp_path, options, plugin):
    callback = DamagesTheDrive(tmp_path / "ssd", tmp_path / "it.ckpt")
    strategy = on_ssd(tmp_path / "ssd", **options, **({} if plugin is None else {"checkpoint_io": plugin()}))
    with pytest.raises(StorageError, match="is damaged"):
        fit(strategy, 2, callbacks=[callback])
    assert not (tmp_path / "it.ckpt").exists()


def test_state_of_a_run_that_is_over_is_not_overwritten_while_it_is_taken_over(tmp_path):
    seed_everything(11, verbose=False)
    module = LlamaInStep(bfloat16_llama())
    configured = module.configure_optimizers()
    module.configure_optimizers = lambda: configured
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1)
    options = {"callbacks": [saves], "enable_checkpointing": True}
    make_trainer(on_ssd(tmp_path / "ssd", **REFERENCE), max_steps=3, **options).fit(module, token_data())
    with pytest.raises(UnsupportedError, match="state of an earlier run"):
        make_trainer(on_ssd(tmp_path / "ssd", **REFERENCE), max_steps=5, **options).fit(module, token_data())


def test_checkpoints_that_are_written_later_cannot_refer(tmp_path):
    strategy = on_ssd(tmp_path / "ssd", **REFERENCE)
    strategy.checkpoint_io = AsyncCheckpointIO(CXLCheckpointIO())
    with pytest.raises(ConfigError, match="AsyncCheckpointIO may write them later"):
        fit(strategy, 1)
