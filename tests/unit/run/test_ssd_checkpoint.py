"""Generations of state on SSD beside checkpoint files: the one that a file refers to stays, whatever happens."""

import os
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from lightning_cxl.config import read_ssd_options
from lightning_cxl.devices import HostEngine
from lightning_cxl.errors import CheckpointError, ConfigError, StorageError
from lightning_cxl.inventory.tensors import PlannedRecord, PlannedTensor
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.optim.swapped_state import OnSsd
from lightning_cxl.run.checkpoint import save_file
from lightning_cxl.run.state_on_ssd import KEY, SSD, StateOnSsd, commit_beside, refer, whole
from lightning_cxl.storage.drive import Folder
from lightning_cxl.storage.store import Store
from tests.storage_cases import memory_of

NBYTES = 1 << 16


class UsersOwn:
    """A type that `torch.load` does not trust, with what pickles may have."""

    def __init__(self):
        self.entries, self.names, self.path = [1, {2: 3}], {"a", "b"}, Path("x")


class Run:
    """One run that keeps state in `folder`: a record, and checkpoints that refer to it."""

    def __init__(self, folder, planned=()):
        options = read_ssd_options({"path": str(folder / "ssd"), "budget": "64MiB", "checkpoint": "reference"})
        self.state = StateOnSsd(options, 64 << 20, planned, memory_of, HostEngine())
        self.record = self.state.state.reserve("record", NBYTES)

    def step(self, value):
        with self.state.state.use([self.record]) as swapped:
            swapped.places[0][1].tensor((self.record.record.padded_nbytes,), torch.uint8).fill_(value)
        self.state.state.wait()

    def save(self, path, error_before=None, error_after=None):
        with commit_beside(self.state, str(path)) as entry:
            if error_before is not None:
                raise error_before
            torch.save({"state_dict": OrderedDict(w=torch.ones(3)), "user": UsersOwn(), KEY: {SSD: entry}}, path)
            if error_after is not None:
                raise error_after

    def killed_before_the_file(self, path):
        self.state.store.commit({"checkpoint": str(path), "token": "of no file"})
        self.state.close()

    def is_resumed(self, path):
        """Return what the record has when the run goes on with a checkpoint."""
        saved = torch.load(path, weights_only=False)[KEY][SSD]
        self.state.restore(saved["generation"])
        return self.value

    @property
    def value(self):
        return self.state.state.view(self.record).tensor((1,), torch.uint8)[0].item()

    @property
    def generations(self):
        return [each.number for each in self.state.store.generations()]


@pytest.fixture
def begins(tmp_path):
    """Begins runs in the same folder, and closes what a test leaves open."""
    runs = []

    def begin(**options):
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.state.close()


@pytest.mark.parametrize("saved", [False, True], ids=["before the file", "after the file"])
def test_a_run_begins_anew_where_one_was_killed_that_always_saved_under_one_name(begins, tmp_path, saved):
    path = tmp_path / "newest.ckpt"
    run = begins()
    run.step(1)
    run.save(path)
    run.step(2)
    if saved:
        run.state.store.settle = lambda number: None
        run.save(path)
        run.state.close()
    else:
        run.killed_before_the_file(path)
    run = begins()
    assert run.generations == [1, 2]
    run.step(9)
    assert run.is_resumed(path) == (2 if saved else 1)


@pytest.mark.parametrize(("when", "first"), [("after", False), ("after", True), ("before", False)])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "the folder cannot be synced")])
def test_an_error_leaves_what_the_file_of_this_name_refers_to(begins, tmp_path, error, when, first):
    path = tmp_path / "newest.ckpt"
    run = begins()
    run.step(1)
    if not first:
        run.save(path)
        run.step(2)
    with pytest.raises(type(error)):
        run.save(path, **{f"error_{when}": error})
    run.step(3)
    assert run.is_resumed(path) == (2 if when == "after" and not first else 1)


def test_a_run_that_begins_anew_may_save_before_its_first_step(begins, tmp_path):
    run = begins()
    run.step(1)
    run.save(tmp_path / "a.ckpt")
    run.step(2)
    run.killed_before_the_file(tmp_path / "b.ckpt")
    run = begins()
    run.save(tmp_path / "c.ckpt")
    assert run.generations == [3]


def test_the_state_of_another_model_is_refused(begins, tmp_path):
    run = begins()
    run.save(tmp_path / "a.ckpt")
    run.state.close()
    with pytest.raises(ConfigError, match="which has no record `other`"):
        other = PlannedTensor(torch.empty(0), TensorRole.MOMENTUM, NBYTES, in_state=True)
        begins(planned=[PlannedRecord("other", "other", (other,))])


@pytest.mark.parametrize("saves", [False, True])
def test_a_parameter_joins_a_run_that_began_anew(begins, tmp_path, saves):
    run = begins()
    run.step(1)
    run.save(tmp_path / "a.ckpt")
    run.state.close()
    run = begins()
    run.step(2)
    if saves:
        run.save(tmp_path / "a.ckpt")
    parameter = torch.nn.Parameter(torch.zeros(100))
    flat = run.state.flat(parameter, "head", TensorRole.MOMENTUM, torch.float32, 100)
    assert flat.shape == (100,)
    run.save(tmp_path / "b.ckpt")
    assert run.is_resumed(tmp_path / "b.ckpt") == 2


@pytest.mark.parametrize("gone", ["parent/drive0", "drive0", "drive1", "drive0/lightning_cxl-manifest.json"])
def test_state_that_is_gone_is_said_and_nothing_is_made(tmp_path, gone):
    paths = [tmp_path / "parent" / "drive0" if "parent" in gone else tmp_path / "drive0", tmp_path / "drive1"]
    for path in paths:
        if str(path) != str(tmp_path / gone):
            path.mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=f"generation 3 in .* is gone: there is no `{tmp_path / gone}`"):
        whole([], {"folders": [str(path) for path in paths], "generation": 3})
    assert sorted(tmp_path.rglob("*")) == before


def referring(run, path):
    """Save what refers to the record of a run, and end the run; returns states and entry of the checkpoint."""
    tensor = run.record.take(torch.uint8, NBYTES)
    run.step(7)
    states = [{"state": {0: {"exp_avg": OnSsd.of(run.record, tensor)}}, "param_groups": []}]
    referred = refer(states)
    with commit_beside(run.state, str(path)) as entry:
        torch.save({KEY: {SSD: entry}}, path)
    run.state.close()
    return referred, entry


@pytest.mark.parametrize("at", [0, NBYTES // 2, NBYTES - 1])
def test_state_becomes_a_tensor_and_damaged_state_does_not(begins, tmp_path, at):
    states, entry = referring(begins(), tmp_path / "a.ckpt")
    (data,) = (tmp_path / "ssd").glob("*.data")
    contents = bytearray(data.read_bytes())
    position = contents.index(bytes([7]) * NBYTES) + at
    contents[position] ^= 1
    data.write_bytes(contents)
    with pytest.raises(StorageError, match="record `record` is damaged"):
        whole(states, entry)
    contents[position] ^= 1
    data.write_bytes(contents)
    (plain,) = whole(states, entry)  # the folder is free again
    assert plain["state"][0]["exp_avg"].tolist() == [7] * NBYTES


def test_state_of_another_run_does_not_become_a_tensor(begins, tmp_path):
    states, entry = referring(begins(), tmp_path / "a.ckpt")
    states[0]["state"][0]["exp_avg"]["lightning_cxl_record"] = "other"
    with pytest.raises(CheckpointError, match=r"in record `other`, and .* has no record of this name"):
        whole(states, entry)


def test_the_names_of_new_folders_of_a_checkpoint_lie_on_the_disk(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noting(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    folder = tmp_path / "a" / "b"
    for expected in ({folder, folder.parent, tmp_path}, {folder}):
        save_file({}, folder / "file.ckpt")
        assert set(synced[1:]) == {str(each) for each in expected}
        synced.clear()


def settle_fails_once(run, monkeypatch):
    """Let the disk be full for the manifest of the next `settle`."""
    folder, write_new = Path(run.state.folders[0]), Folder.write_new
    settle = Store.settle

    def fails(store, number):
        monkeypatch.setattr(Store, "settle", settle)
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "write_new", full)
            settle(store, number)

    def full(main, name, contents):
        write_new(main, name, contents[:10])
        raise StorageError("cannot write", path=folder / name, errno=28)

    monkeypatch.setattr(Store, "settle", fails)


@pytest.mark.parametrize("then", ["step", "save"])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_a_run_goes_on_where_a_generation_could_not_be_let_go_of(begins, tmp_path, monkeypatch, then, error):
    run = begins()
    run.step(1)
    run.save(tmp_path / "a.ckpt")
    run.step(2)
    settle_fails_once(run, monkeypatch)
    with pytest.raises(StorageError if error is None else KeyboardInterrupt):
        run.save(tmp_path / "b.ckpt", error_before=error)
    assert run.generations == [1, 2]
    if then == "step":
        run.step(3)
        assert run.generations == ([2] if error is None else [1])
    else:
        run.save(tmp_path / "c.ckpt")
        run.step(3)
        assert run.generations == [3] and run.is_resumed(tmp_path / "c.ckpt") == 2


def test_a_run_goes_on_where_a_commit_failed(begins, tmp_path, monkeypatch):
    run = begins()
    run.step(1)
    run.save(tmp_path / "a.ckpt")
    run.step(2)
    with monkeypatch.context() as patch:

        def cannot_tell(folder, name):
            raise StorageError("cannot replace", path=folder.path / name, errno=5)

        patch.setattr(Folder, "publish", cannot_tell)
        with pytest.raises(StorageError, match="cannot replace"):
            run.save(tmp_path / "b.ckpt")
    run.step(3)
    run.step(4)
    assert run.is_resumed(tmp_path / "a.ckpt") == 1


def test_state_of_an_earlier_version_is_left_alone_where_it_is_not_known_which_stays(begins, tmp_path):
    run = begins()
    run.step(1)
    for name in ("a.ckpt", "b.ckpt"):
        run.state.store.commit({"checkpoint": str(tmp_path / name)})
    run.state.close()
    run = begins()
    with pytest.raises(CheckpointError, match="resume from the file that is there, or empty that folder"):
        run.step(9)
    assert run.generations == [1, 2]
