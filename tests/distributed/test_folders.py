"""What is in checkpoint folders, what is left of those that were not finished, and errors of one process."""

import fcntl
import os

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_cxl.errors import CheckpointError
from lightning_cxl.run.checkpoint import remove
from lightning_cxl.run.sharded_checkpoint import ShardedCheckpoint, optimizer_tensors, save
from tests.distributed.training import place

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Nested(torch.optim.Optimizer):
    """Keeps lists and dicts of tensors, as second-order optimizers do."""

    def __init__(self, groups, lr=0.1):
        super().__init__(groups, {"lr": torch.tensor(lr), "betas": [torch.tensor(0.9), torch.tensor(0.95)]})

    def fill(self, number):
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                like = torch.full_like(parameter, number)
                self.state[parameter] = {"factors": [like, like[:1] + 1], "of.dim": {"0": like + 2}, "step": number}
        return self


class Model(nn.Module):
    """Names with digits, and something beside tensors."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(3, 2)) for _ in range(2)])
        self.exp_avg = nn.ModuleList([nn.Linear(2, 2)])
        self.note = {"text": "", "list": [0]}

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def optimizer_of(model):
    return Nested([{"params": list(model.weights)}, {"params": list(model.exp_avg.parameters()), "lr": 0.5}])


def names_of(model):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return names.__getitem__


def test_names_with_dots_and_nested_state_come_back(tmp_path):
    model = Model()
    optimizer = optimizer_of(model).fill(7)
    with torch.no_grad():
        model.weights[1].fill_(3)
    model.note = {"text": "kept", "list": [1, 2]}
    path = tmp_path / "a.ckpt"
    save(path, {"state_dict": model.state_dict(), "optimizer_0": optimizer_tensors(optimizer, names_of(model))}, {})
    other = Model()
    loaded = optimizer_of(other)
    folder = ShardedCheckpoint(path)
    assert folder.read_weights(other, strict=True) == []
    folder.optimizer(0, loaded, names_of(other))
    assert other.note == model.note and torch.equal(other.weights[1], model.weights[1])
    assert [group["lr"] for group in loaded.param_groups] == [torch.tensor(0.1), 0.5]
    assert [list(map(float, group["betas"])) for group in loaded.param_groups] == [
        [pytest.approx(0.9), pytest.approx(0.95)]
    ] * 2
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        mine, expected = loaded.state[ours], optimizer.state[theirs]
        assert mine.keys() == expected.keys() and mine["step"] == expected["step"]
        assert all(torch.equal(a, b) for a, b in zip(mine["factors"], expected["factors"], strict=True))
        assert torch.equal(mine["of.dim"]["0"], expected["of.dim"]["0"])


def test_groups_of_other_parameters_are_refused(tmp_path):
    model = Model()
    optimizer = optimizer_of(model).fill(0)
    save(tmp_path / "a.ckpt", {"optimizer_0": optimizer_tensors(optimizer, names_of(model))}, {})
    parameters = list(model.parameters())
    other = Nested([{"params": parameters[:1]}, {"params": parameters[1:]}])
    with pytest.raises(CheckpointError, match=r"`weights\.1`\) are spread over the saved groups"):
        ShardedCheckpoint(tmp_path / "a.ckpt").optimizer(0, other, names_of(model))


def write(path, number):
    save(path, {"state_dict": {"w": torch.tensor([number])}}, {"number": number})


def number_in(path):
    folder = ShardedCheckpoint(path)
    assert int(folder.tensor("state_dict.w")) == folder.rest()["number"]
    return int(folder.tensor("state_dict.w"))


def left_by_a_kill(folder, name):
    folder.mkdir(exist_ok=True)
    left = folder / f".{name}.partial"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"x")
    return left


def test_what_killed_runs_have_left_is_removed_and_nothing_else(tmp_path):
    left = [left_by_a_kill(tmp_path, name) for name in ("a.ckpt", "step=3.ckpt")]
    written, users = left_by_a_kill(tmp_path, "b.ckpt"), left_by_a_kill(tmp_path, "mine")
    (users / "notes.txt").write_text("")
    fd = os.open(written, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # as a run that is saving there
        write(tmp_path / "a.ckpt", 1)
    finally:
        os.close(fd)
    assert not any(path.exists() for path in left)
    assert written.is_dir() and users.is_dir() and number_in(tmp_path / "a.ckpt") == 1


@pytest.mark.parametrize("before", ["a folder", "a file", "a link", "a link to nothing"])
def test_what_has_the_name_is_replaced(tmp_path, before):
    path, aim = tmp_path / "last.ckpt", tmp_path / "step=1.ckpt"
    write(aim, 1)
    if before == "a folder":
        write(path, 0)
    elif before == "a file":
        path.write_bytes(b"x")
    else:
        path.symlink_to(aim.name if before == "a link" else "gone")
    write(path, 2)
    assert number_in(path) == 2 and not path.is_symlink() and number_in(aim) == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last.ckpt", "step=1.ckpt"]


def test_a_checkpoint_is_removed_at_once(tmp_path, monkeypatch):
    write(tmp_path / "a.ckpt", 1)

    def die(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            remove(tmp_path / "a.ckpt")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".a.ckpt.") and left.name.endswith(".partial")
    write(tmp_path / "b.ckpt", 1)
    assert [each.name for each in tmp_path.iterdir()] == ["b.ckpt"]


def save_where_one_cannot(path):
    """Save twice: as it should be, and with a second process whose drive is full."""
    rank, world = place()
    write(path, 1)
    usual = FileSystemWriter.write_data

    def write_data(self, plan, planner):
        if rank == world - 1:
            raise OSError(28, "No space left on device")
        return usual(self, plan, planner)

    FileSystemWriter.write_data = write_data
    try:
        write(path, 2)
    except CheckpointError as error:
        return str(error)
    finally:
        FileSystemWriter.write_data = usual
    return None


def test_an_error_of_one_process_is_raised_by_all(ranks, tmp_path):
    path = tmp_path / "a.ckpt"
    errors = ranks.of(2).run(save_where_one_cannot, path)
    assert all(error is not None and "No space left on device" in error for error in errors), errors
    assert number_in(path) == 1
