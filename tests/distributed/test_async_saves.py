"""Checkpoints of several processes: errors of one of them, and checkpoints that are written while training goes on."""

import contextlib
import threading
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.run.sharded_checkpoint import AsyncSaves, ShardedCheckpoint, save
from tests.distributed import lightning_runs, training
from tests.distributed.test_lightning import STATES
from tests.distributed.training import Job, assert_identical, cut_model, error_of, place

FULL = "CheckpointError: could not write checkpoint"
LIMIT_S = 30


def fit(steps, callback=None, *, trainer=None, **keywords):
    """Train, with checkpoints that are written meanwhile."""
    return lightning_runs.fit(
        steps, callback=callback, trainer={"plugins": [AsyncCheckpointIO()], **(trainer or {})}, **keywords
    )


@contextlib.contextmanager
def writing(before):
    """Return a region in which `before` is called before this rank writes its shards."""
    usual = FileSystemWriter.write_data

    def write_data(self, plan, planner):
        before()
        return usual(self, plan, planner)

    FileSystemWriter.write_data = write_data
    try:
        yield
    finally:
        FileSystemWriter.write_data = usual


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

    def __init__(self, **actions):
        self.actions = actions
        self.steps = []

    def on_train_batch_end(self, trainer, *_):
        self.steps.append(trainer.global_step)
        self.actions.get(f"step_{trainer.global_step}", lambda trainer: None)(trainer)

    def state_dict(self):
        return {"steps": self.steps}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def save_with_room_and_without(path):
    save(path, {"state_dict": {"w": torch.tensor([1])}}, {})
    with writing(full_drive):
        return error_of(lambda: save(path, {"state_dict": {"w": torch.tensor([2])}}, {}))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_an_error_of_one_rank_is_raised_by_all_and_leaves_what_was_there(ranks, tmp_path):
    for error in ranks.of(2).run(save_with_room_and_without, tmp_path / "a.ckpt"):
        assert error.startswith("CheckpointError") and "No space left on device" in error
    assert int(ShardedCheckpoint(tmp_path / "a.ckpt").tensor("state_dict.w")) == 1


def saved_meanwhile(path, **keywords):
    """Save at step 3, and write that when step 5 has ended; return whether it had its name then and at the end."""
    held, found = Held(), []

    def at_step_5(trainer):
        found.append(Path(path).exists())
        held.set()

    with writing(held):
        fit(6, At(step_3=lambda trainer: trainer.save_checkpoint(path), step_5=at_step_5), **keywords)
    return [*found, Path(path).exists()]


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
        errors.append(error_of(lambda: fit(3, At(step_1=saving(1), step_2=saving(2)))))
        errors.append(error_of(lambda: fit(2, At(step_1=saving(3)))))
    errors.append(error_of(lambda: fit(2, At(step_1=saving(4)))))
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
    errors = []

    class Bad(At):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            if not errors and place()[0] == 0:
                checkpoint["bad"] = threading.Lock()

    def save(trainer):
        try:
            trainer.save_checkpoint(path)
            errors.append(None)
        except Exception as error:
            errors.append(str(error))

    fit(2, Bad(step_1=save, step_2=save))
    return errors


def test_what_one_rank_cannot_copy_no_rank_saves(ranks, tmp_path):
    first, second = ranks.of(2).run(unpicklable, tmp_path / "it.ckpt")
    assert "cannot pickle" in first[0] and "rank 0 of the group: TypeError: cannot pickle" in second[0]
    assert first[1] is second[1] is None and (tmp_path / "it.ckpt").is_dir()


def act_while_it_is_written(folder, act):
    """Save, and do something that waits for it, or not; return what that has found."""
    held = Held()

    def save(trainer):
        trainer.save_checkpoint(folder / "1.ckpt")
        held.set_later()
        found.append(act(trainer, folder))

    found = []
    with writing(held):
        fit(2, At(step_2=save))
    return found


def save_again(trainer, folder):
    trainer.save_checkpoint(folder / "2.ckpt")
    return (folder / "1.ckpt").exists()


def load(trainer, folder):
    return trainer.strategy.load_checkpoint(folder / "1.ckpt", weights_only=False)["seen"]


def remove(trainer, folder):
    trainer.strategy.remove_checkpoint(folder / "1.ckpt")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("act", "found", "left"),
    [(save_again, True, ["1.ckpt", "2.ckpt"]), (load, 2, ["1.ckpt"]), (remove, None, [])],
)
def test_what_follows_a_save_waits_for_it(ranks, tmp_path, act, found, left):
    assert ranks.of(2).run(act_while_it_is_written, tmp_path, act) == [[found]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def raising(path, *, fails):
    """Save, and raise while that is written, or fails to be; return the error, whether it is there, and warnings."""
    held = Held()

    def before():
        held()
        if fails:
            full_drive()

    def save_and_raise(trainer):
        trainer.save_checkpoint(path)
        held.set_later()
        raise ValueError("of the user")

    with writing(before), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="of the user"):
            fit(3, At(step_1=save_and_raise))
    return path.exists(), [str(each.message) for each in caught if each.category is LightningCXLWarning]


@pytest.mark.parametrize("fails", [False, True])
def test_who_raises_waits(ranks, tmp_path, fails):
    for is_there, told in ranks.of(2).run(raising, tmp_path / "it.ckpt", fails=fails):
        assert is_there != fails
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

    def at_step_5(trainer):
        found.append(names_in(folder))
        held.set()

    keeping = ModelCheckpoint(folder, "{step}", every_n_train_steps=2)
    with writing(before):
        error = error_of(lambda: fit(5, [keeping, At(step_5=at_step_5)], trainer={"enable_checkpointing": True}))
    assert bool(error) == fails, error
    return [*found, names_in(folder)]


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_checkpoint_stays_until_the_next_one_is_complete(ranks, tmp_path, fails):
    found = ranks.of(2).run(replacing, tmp_path, fails=fails)
    kept = "step=2.ckpt" if fails else "step=4.ckpt"
    assert found[0] == [["step=2.ckpt"], [kept]]
    assert ShardedCheckpoint(tmp_path / kept).rest()["global_step"] == int(kept[5])


def of_host_shards(path):
    """Write shards that lie on the host for a device apart, which change meanwhile; return whether they are as then."""
    model = training.make_model(Job())
    session = cut_model(model)
    before = {name: training.whole(each) for name, each in model.named_parameters()}
    saves, held = AsyncSaves(), Held()
    try:
        with writing(held):
            saves.save(path, {"state_dict": model.state_dict()}, {})
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            held.set()
            saves.wait()
    finally:
        saves.close()
        session.close()
    folder = ShardedCheckpoint(path)
    return [torch.equal(folder.tensor(f"state_dict.{name}"), value) for name, value in before.items()]


def test_shards_on_the_host_of_a_device_are_those_of_the_moment(ranks, tmp_path):
    found = ranks.of(2, "apart").run(of_host_shards, tmp_path / "it.ckpt")
    assert found[0] and all(map(all, found))


def refusal(**keywords):
    return error_of(lambda: fit(1, **keywords))


def test_what_cannot_be_written_meanwhile_is_refused(ranks, tmp_path):
    ssd = {
        "tiers": {"ssd": {"path": str(tmp_path), "budget": "64MiB"}},
        "tier_rules": {"*": {"optimizer_state": "ssd"}},
    }
    for found in ranks.of(2).run(refusal, options=ssd):
        assert found.startswith("UnsupportedError: rank 0 of the group: optimizer state or weights of this run lie on")
    linking = ModelCheckpoint(tmp_path, save_last="link")
    for found in ranks.of(2).run(refusal, callback=linking, trainer={"enable_checkpointing": True}):
        assert found.startswith("ConfigError: rank 0 of the group: ModelCheckpoint(save_last='link') links")
