import threading
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.run.sharded_checkpoint import AsyncSaves, ShardedCheckpoint
from tests.distributed import lightning_runs
from tests.distributed.test_lightning import STATES
from tests.distributed.test_ssd import on_ssd
from tests.distributed.training import assert_identical, error_of, place

FULL = "CheckpointError: could not write checkpoint"
LIMIT_S = 30


def fit(steps, callback=None, *, trainer=None, **keywords):
    """Train, with checkpoints that are written meanwhile."""
    return lightning_runs.fit(
        steps, callback=callback, trainer={"plugins": [AsyncCheckpointIO()], **(trainer or {})}, **keywords
    )


def writing(before):
    """Return a region in which `before` is called before this rank writes its shards."""
    usual = FileSystemWriter.write_data
    return mock.patch.object(FileSystemWriter, "write_data", lambda *args: (before(), usual(*args))[1])


class Held(threading.Event):
    """Lets writes wait until it is set."""

    def __call__(self):
        if not self.wait(LIMIT_S):
            raise TimeoutError("training has not gone on")

    def set_later(self):
        """Let it write while this thread waits for it."""
        threading.Timer(0.5, self.set).start()


def full_drive():
    rank, world = place()
    if rank == world - 1:
        raise OSError(28, "No space left on device")


class At(Callback):
    """Does something at the end of some steps, and has state that changes with every step."""

    state_key = "At"

    def __init__(self, actions):
        self.actions = actions
        self.steps = []

    def on_train_batch_end(self, trainer, *_):
        self.steps.append(trainer.global_step)
        self.actions.get(trainer.global_step, lambda trainer: None)(trainer)

    def state_dict(self):
        return {"steps": self.steps}


def saved_meanwhile(path, **keywords):
    """Save at step 3, and write that when step 5 has ended; return whether it had its name then and at the end."""
    held, found = Held(), []

    def look(trainer=None):
        found.append(Path(path).exists())
        held.set()

    with writing(held):
        fit(6, At({3: lambda trainer: trainer.save_checkpoint(path), 5: look}), **keywords)
    look()
    return found


@pytest.mark.parametrize("state", ["bf16 with float32 masters", "8 bit state"])
def test_training_goes_on_and_a_resume_is_exact(ranks, tmp_path, state):
    path, pair = str(tmp_path / "half.ckpt"), ranks.of(2)
    assert pair.run(saved_meanwhile, path, **STATES[state]) == [[False, True]] * 2
    assert ShardedCheckpoint(tmp_path / "half.ckpt").rest()["callbacks"]["At"] == {"steps": [1, 2, 3]}
    whole = pair.run(lightning_runs.fit, 6, **STATES[state])[0]
    rest = pair.run(lightning_runs.fit, 6, resume=path, **STATES[state])[0]
    assert_identical(rest, {**whole, "losses": whole["losses"][3:]})


def failing(folder):
    """Return the errors of saves, of which the first cannot be written, and of the end of the run."""
    errors = []

    def saving(number):
        return lambda trainer: errors.append(error_of(lambda: trainer.save_checkpoint(folder / f"{number}.ckpt")))

    with writing(full_drive):
        errors.append(error_of(lambda: fit(3, At({1: saving(1), 2: saving(2)}))))
        errors.append(error_of(lambda: fit(2, At({1: saving(3)}))))
    errors.append(error_of(lambda: fit(2, At({1: saving(4)}))))
    return errors


def test_an_error_of_one_rank_reaches_all_at_the_next_save_or_at_the_end(ranks, tmp_path):
    for errors in ranks.of(2).run(failing, tmp_path):
        begun, next_save, at_the_end, other, other_end, good, good_end = errors
        assert begun == other == at_the_end == good == good_end == ""
        assert next_save.startswith(f"{FULL} `{tmp_path / '1.ckpt'}`") and "No space left on device" in next_save
        assert other_end.startswith(f"{FULL} `{tmp_path / '3.ckpt'}`") and "No space left on device" in other_end
    assert [path.name for path in tmp_path.iterdir()] == ["4.ckpt"]


def unpicklable(path):
    """Return the errors of a save that one rank cannot copy, and of the one after it."""
    errors, saves = [], AsyncSaves()
    for rest in ({"bad": threading.Lock()} if place()[0] == 0 else {}, {}):
        try:
            saves.save(path, {"state_dict": {"w": torch.tensor([1])}}, rest)
            errors.append("")
        except Exception as error:
            errors.append(str(error))
    saves.close()
    return errors


def test_what_one_rank_cannot_copy_no_rank_saves(ranks, tmp_path):
    first, second = ranks.of(2).run(unpicklable, tmp_path / "it.ckpt")
    assert "cannot pickle" in first[0] and "rank 0 of the group: TypeError: cannot pickle" in second[0]
    assert first[1] == second[1] == "" and (tmp_path / "it.ckpt").is_dir()


def act_while_it_is_written(folder, act, fails=False):
    """Save, and do something that waits for it, or not; return what that has found, error and warnings of the run."""
    held, found = Held(), []

    def before():
        held()
        if fails:
            full_drive()

    def save(trainer):
        trainer.save_checkpoint(folder / "1.ckpt")
        held.set_later()
        found.append(act(trainer, folder))

    with writing(before), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(2, At({2: save}))
        except ValueError as error:
            found.append(str(error))
    return found, [str(each.message) for each in caught if each.category is LightningCXLWarning]


def save_again(trainer, folder):
    trainer.save_checkpoint(folder / "2.ckpt")
    return (folder / "1.ckpt").exists()


def load(trainer, folder):
    return trainer.strategy.load_checkpoint(folder / "1.ckpt", weights_only=False)["seen"]


def remove(trainer, folder):
    trainer.strategy.remove_checkpoint(folder / "1.ckpt")


def fail(trainer, folder):
    raise ValueError("of the user")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("act", "found", "left"), [(save_again, True, ["1.ckpt", "2.ckpt"]), (load, 2, ["1.ckpt"]), (remove, None, [])]
)
def test_what_follows_a_save_waits_for_it(ranks, tmp_path, act, found, left):
    assert ranks.of(2).run(act_while_it_is_written, tmp_path, act) == [([found], [])] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == left


@pytest.mark.parametrize("fails", [False, True])
def test_who_raises_waits(ranks, tmp_path, fails):
    for found, told in ranks.of(2).run(act_while_it_is_written, tmp_path, fail, fails):
        assert found == ["of the user"] and (tmp_path / "1.ckpt").exists() != fails
        assert any("No space left on device" in each for each in told) == fails, told


def replacing(folder, *, fails):
    """Let `ModelCheckpoint` keep one of two; return those that are there while the second is written, and after."""
    held, number, found = Held(), [0], []

    def before():
        number[0] += 1
        if number[0] == 2:
            held()
            if fails:
                full_drive()

    def look(trainer=None):
        found.append(sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")))
        held.set()

    keeping = ModelCheckpoint(folder, "{step}", every_n_train_steps=2)
    with writing(before):
        error = error_of(lambda: fit(5, [keeping, At({5: look})], trainer={"enable_checkpointing": True}))
    assert bool(error) == fails, error
    look()
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_checkpoint_stays_until_the_next_one_is_complete(ranks, tmp_path, fails):
    found = ranks.of(2).run(replacing, tmp_path, fails=fails)
    kept = "step=2.ckpt" if fails else "step=4.ckpt"
    assert found[0] == [["step=2.ckpt"], [kept]]
    assert ShardedCheckpoint(tmp_path / kept).rest()["global_step"] == int(kept[5])


def refusal(**keywords):
    return error_of(lambda: fit(1, **keywords))


def test_what_cannot_be_written_meanwhile_is_refused(ranks, tmp_path):
    for found in ranks.of(2).run(refusal, options=on_ssd(tmp_path)):
        assert found.startswith("UnsupportedError: rank 0 of the group: optimizer state or weights of this run lie on")
    linking = ModelCheckpoint(tmp_path, save_last="link")
    for found in ranks.of(2).run(refusal, callback=linking, trainer={"enable_checkpointing": True}):
        assert found.startswith("ConfigError: rank 0 of the group: ModelCheckpoint(save_last='link') links")
