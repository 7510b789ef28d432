"""Checkpoint folders of one process: complete or not there, and damage is said."""

import pytest
import torch

from lightning_cxl.errors import CheckpointError
from lightning_cxl.run import sharded_checkpoint
from lightning_cxl.run.checkpoint import is_sharded_checkpoint
from lightning_cxl.run.sharded_checkpoint import ShardedCheckpoint, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def weights(value):
    return {"state_dict": {"a.weight": torch.full((3, 4), value)}}


def read(path):
    target = {"state_dict.a.weight": torch.zeros(3, 4)}
    return ShardedCheckpoint(path).read(target)["state_dict.a.weight"]


def test_what_was_saved_is_read(tmp_path):
    path = tmp_path / "deep" / "one.ckpt"
    save(path, weights(1.5), {"epoch": 3})
    assert is_sharded_checkpoint(path)
    assert read(path).eq(1.5).all()
    assert ShardedCheckpoint(path).rest() == {"epoch": 3}
    assert [each.name for each in path.parent.iterdir()] == ["one.ckpt"]


@pytest.mark.parametrize("before", ["nothing", "a folder", "a file"])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, before):
    path = tmp_path / "last.ckpt"
    if before == "a folder":
        save(path, weights(1.0), {})
    elif before == "a file":
        path.write_bytes(b"of one process")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sharded_checkpoint.torch, "save", full)
    with pytest.raises(CheckpointError, match=r"last.ckpt.*No space left.*as it was"):
        save(path, weights(2.0), {})
    monkeypatch.undo()
    if before == "a folder":
        assert read(path).eq(1.0).all()
    else:
        assert path.exists() == (before == "a file")
    save(path, weights(2.0), {})
    assert read(path).eq(2.0).all()
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_does_not_fit_is_said(tmp_path):
    path = tmp_path / "one.ckpt"
    save(path, weights(1.0), {})
    folder = ShardedCheckpoint(path)
    with pytest.raises(CheckpointError, match=r"has no `state_dict.b`; it has `state_dict.a.weight`"):
        folder.read({"state_dict.b": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"shape \(3, 4\), and \(4, 3\) here"):
        folder.read({"state_dict.a.weight": torch.zeros(4, 3)})
    for file in path.glob("*.distcp"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        read(path)
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        ShardedCheckpoint(path)
