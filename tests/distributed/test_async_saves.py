"""Checkpoints of several processes that are written while training goes on."""

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_cxl.run.sharded_checkpoint import ShardedCheckpoint
from tests.distributed import async_runs, lightning_runs
from tests.distributed.test_lightning import STATES, assert_identical

FULL = "CheckpointError: could not write checkpoint"


@pytest.mark.parametrize("state", ["bf16 with float32 masters", "8 bit state"])
def test_training_goes_on_and_a_resume_is_exact(ranks, tmp_path, state):
    path, pair = str(tmp_path / "half.ckpt"), ranks.of(2)
    assert pair.run(async_runs.saved_meanwhile, path, **STATES[state]) == [[False, True]] * 2
    assert ShardedCheckpoint(tmp_path / "half.ckpt").rest()["callbacks"]["At"] == {"steps": [1, 2, 3]}
    whole = pair.run(lightning_runs.fit, 6, **STATES[state])[0]
    rest = pair.run(lightning_runs.fit, 6, resume=path, **STATES[state])[0]
    assert_identical(rest, {**whole, "losses": whole["losses"][3:]})


def test_an_error_of_one_rank_reaches_all_at_the_next_save_or_at_the_end(ranks, tmp_path):
    for errors in ranks.of(2).run(async_runs.failing, tmp_path):
        begun, next_save, at_the_end, other, other_end, good, good_end = errors
        assert begun is other is at_the_end is good is good_end is None
        assert next_save.startswith(f"{FULL} `{tmp_path / '1.ckpt'}`") and "No space left on device" in next_save
        assert other_end.startswith(f"{FULL} `{tmp_path / '3.ckpt'}`") and "No space left on device" in other_end
    assert [path.name for path in tmp_path.iterdir()] == ["4.ckpt"]


def test_what_one_rank_cannot_copy_no_rank_saves(ranks, tmp_path):
    first, second = ranks.of(2).run(async_runs.unpicklable, tmp_path / "it.ckpt")
    assert "cannot pickle" in first[0] and "rank 0 of the group: TypeError: cannot pickle" in second[0]
    assert first[1] is second[1] is None and (tmp_path / "it.ckpt").is_dir()


def test_the_next_save_waits(ranks, tmp_path):
    for found in ranks.of(2).run(async_runs.saved_twice, tmp_path):
        assert found == ([True], ["1.ckpt", "2.ckpt"])


def test_loading_waits(ranks, tmp_path):
    assert ranks.of(2).run(async_runs.loaded_at_once, tmp_path / "it.ckpt") == [[2]] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_who_raises_waits(ranks, tmp_path, fails):
    for error, is_there, told in ranks.of(2).run(async_runs.raising, tmp_path / "it.ckpt", fails=fails):
        assert error == "of the user" and is_there != fails
        assert any("No space left on device" in each for each in told) == fails, told


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_checkpoint_stays_until_the_next_one_is_complete(ranks, tmp_path, fails):
    found = ranks.of(2).run(async_runs.replacing, tmp_path, fails=fails)
    kept = "step=2.ckpt" if fails else "step=4.ckpt"
    assert found[0] == [["step=2.ckpt"], [kept]]
    assert ShardedCheckpoint(tmp_path / kept).rest()["global_step"] == int(kept[5])


def test_what_is_being_written_can_be_removed(ranks, tmp_path):
    ranks.of(2).run(async_runs.removed_meanwhile, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_shards_on_the_host_of_a_device_are_those_of_the_moment(ranks, tmp_path):
    found = ranks.of(2, "apart").run(async_runs.of_host_shards, tmp_path / "it.ckpt")
    assert found[0] and all(map(all, found))


def test_state_on_ssd_is_refused(ranks, tmp_path):
    options = {
        "tiers": {"ssd": {"path": str(tmp_path), "budget": "64MiB"}}, "tier_rules": {"*": {"optimizer_state": "ssd"}},
    }  # fmt: skip
    for found in ranks.of(2).run(async_runs.refusal, options=options):
        assert found.startswith("UnsupportedError: rank 0 of the group: optimizer state or weights of this run lie on")


def test_links_are_refused(ranks, tmp_path):
    linking = ModelCheckpoint(tmp_path, save_last="link")
    for found in ranks.of(2).run(async_runs.refusal, callback=linking, trainer={"enable_checkpointing": True}):
        assert found.startswith("ConfigError: rank 0 of the group: ModelCheckpoint(save_last='link') links")
