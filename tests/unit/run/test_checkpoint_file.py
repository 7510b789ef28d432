import errno
import io
import os
from collections import OrderedDict
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from lightning_cxl.config import read_ssd_options
from lightning_cxl.devices import HostEngine
from lightning_cxl.errors import CheckpointError, ConfigError, StorageError
from lightning_cxl.inventory.tensors import PlannedRecord, PlannedTensor
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.optim.swapped_state import OnSsd, StateSwapper, read_states
from lightning_cxl.run import checkpoint as checkpoint_file
from lightning_cxl.run.checkpoint import load_file, save_file
from lightning_cxl.run.state_on_ssd import KEY, SSD, StateOnSsd, commit_beside, refer, whole
from lightning_cxl.storage.drive import Folder
from lightning_cxl.storage.store import Store
from lightning_cxl.storage.swap import BufferPool, Swapper
from tests.fakes import failing
from tests.integration.weight_memory import Peak
from tests.storage_cases import BUDGET, CHUNK, folders, memory_of

NUMELS = (5 * 1024, 3000, 1, 2048)  # of the tensors of each record; 3000 is no whole number of blocks
NBYTES = sum(-(-4 * numel // 64) * 64 for numel in NUMELS)


class State:
    """State of four parameters in four records, updated once; and the checkpoint that a run would make of it."""

    def __init__(self, paths, buffers=2, **options):
        self.store = Store(paths, budget_bytes=BUDGET, chunk_bytes=CHUNK, **options)
        self.swapper = Swapper(self.store, BufferPool(memory_of, 0))
        self.state = StateSwapper(self.swapper)
        self.records = [self.state.reserve(f"record {number}", NBYTES) for number in range(4)]
        self.swapper.raise_cap(buffers * self.records[0].record.padded_nbytes)
        self.expected, entries = {}, {}
        for number, record in enumerate(self.records):
            tensors = [record.take(torch.float32, numel) for numel in NUMELS]
            stand_ins = {f"s{i}": OnSsd.of(record, each) for i, each in enumerate(tensors)}
            entries[number] = {"step": torch.tensor(3.0), **stand_ins}
            with self.state.use([record]) as swapped:
                for tensor in tensors:
                    swapped.flat(tensor).normal_()
                values = [swapped.flat(tensor).clone() for tensor in tensors]
            self.expected[number] = {"step": torch.tensor(3.0), **{f"s{i}": each for i, each in enumerate(values)}}
        self.state.wait()
        self.weights = {"w": torch.randn(100, 100), "b": torch.randn(7), "none": torch.zeros(0)}
        self.entries = entries

    def with_state(self, entries):
        return {"state_dict": self.weights, "optimizer_states": [{"state": entries, "param_groups": []}], "epoch": 1}

    def save(self, path):
        save_file(self.with_state(read_states(self.entries)), path)

    def check(self, loaded):
        entries = loaded["optimizer_states"][0]["state"]
        assert entries.keys() == self.expected.keys() and loaded["epoch"] == 1
        for expected, got in [(self.weights, loaded["state_dict"]), *((self.expected[n], entries[n]) for n in entries)]:
            assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.fixture
def state(tmp_path):
    made = []

    def make(drives=1, **options):
        made.append(State(folders(tmp_path, drives), **options))
        return made[-1]

    yield make
    for each in made:
        each.swapper.close()
        each.store.close()


@pytest.mark.timeout(60)  # a wait for a buffer of its own has no end
@pytest.mark.parametrize("buffers", [1, 2, 5])
@pytest.mark.parametrize("drives", [1, 3])
def test_a_file_is_the_one_that_torch_would_write(state, tmp_path, drives, buffers):
    run, theirs = state(drives, buffers=buffers), tmp_path / "theirs.ckpt"
    run.save(tmp_path / "x.ckpt")
    save_file(run.with_state(run.expected), theirs)
    assert (tmp_path / "x.ckpt").read_bytes() == theirs.read_bytes()
    run.check(torch.load(tmp_path / "x.ckpt", weights_only=True))
    run.check(torch.load(tmp_path / "x.ckpt", weights_only=True, mmap=True))
    run.check(load_file(tmp_path / "x.ckpt", "cpu", True))


def test_a_copy_takes_no_memory_for_the_state(tmp_path):
    """It takes pages of the page cache, which the kernel takes back, and buffers."""
    nbytes, store = 16 << 20, Store(folders(tmp_path), budget_bytes=1 << 30)
    swapper = Swapper(store, BufferPool(memory_of, 2 * nbytes))
    state = StateSwapper(swapper)
    entries = {}
    for number in range(16):
        record = state.reserve(f"record {number}", nbytes)
        tensor = record.take(torch.float32, nbytes // 4)
        with state.use([record]) as swapped:
            swapped.flat(tensor).fill_(number)
        entries[number] = {"exp_avg": OnSsd.of(record, tensor)}
    state.verify()  # now the buffers have their memory
    with Peak() as memory:
        save_file({"optimizer_states": [{"state": read_states(entries), "param_groups": []}]}, tmp_path / "x.ckpt")
    swapper.close()
    store.close()
    assert memory.peak < memory.start + 2 * nbytes, "of 256 MiB"
    loaded = load_file(tmp_path / "x.ckpt", "cpu", True)["optimizer_states"][0]["state"]
    assert all(bool((loaded[number]["exp_avg"] == number).all()) for number in entries)


def test_after_a_full_disk_nothing_is_left_and_the_run_goes_on(state, tmp_path, monkeypatch):
    run, fsync = state(buffers=1), os.fsync

    def no_space(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".partial"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(CheckpointError, match="No space left"):
            run.save(tmp_path / "x.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["drive0"]
    with run.state.use([run.records[0]]) as swapped:
        swapped.places[0][1].tensor((1,), torch.uint8).zero_()
    run.state.wait()


@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError(errno.ENOSPC, "No space left on device"), CheckpointError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_what_ends_a_save_is_said_and_not_how_torch_ends_the_file(tmp_path, monkeypatch, error, expected):
    """Torch ends a file whose write has failed with an error about positions."""

    class Fails(io.BytesIO):
        def write(self, data):
            if len(data) > 1000:
                raise error
            return super().write(data)

    monkeypatch.setattr("lightning_cxl.run.checkpoint.open", lambda *_: Fails(), raising=False)
    with pytest.raises(expected, match=getattr(error, "strerror", None) or "^$") as caught:
        save_file({"weights": torch.ones(1000)}, tmp_path / "x.ckpt")
    assert error in (caught.value, caught.value.__cause__)
    assert not list(tmp_path.iterdir())


def test_others_map_files_as_ever_and_one_that_cannot_be_mapped_is_not_called_damaged(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(4096))
    torch.save({"a": torch.ones(3)}, tmp_path / "it.ckpt")
    show, shared = checkpoint_file._pages, []

    def noting(path, nbytes):
        shared.append(torch.UntypedStorage.from_file(str(tmp_path / "file"), shared=True, nbytes=4096))
        return show(path, nbytes)

    monkeypatch.setattr(checkpoint_file, "_pages", noting)
    load_file(tmp_path / "it.ckpt", "cpu", True)
    shared[0][0] = 7
    assert (tmp_path / "file").read_bytes()[0] == 7
    torch.load(tmp_path / "it.ckpt", mmap=True)
    assert len(shared) == 1
    monkeypatch.setattr(checkpoint_file, "pages_of_file", Mock(side_effect=OSError(19, "No such device")))
    with pytest.raises(CheckpointError, match=r"cannot map checkpoint .*it\.ckpt`: No such device$"):
        load_file(tmp_path / "it.ckpt", "cpu", True)


@pytest.mark.parametrize("at", [0, 2_000_000, 3_999_999])
def test_bits_that_were_flipped_are_found(tmp_path, at):
    path = tmp_path / "it.ckpt"
    torch.save({"a": torch.ones(1_000_000), "b": torch.zeros(3)}, path)
    contents = bytearray(path.read_bytes())
    contents[contents.index(torch.ones(16).numpy().tobytes()) + at] ^= 4
    path.write_bytes(contents)
    with pytest.raises(CheckpointError, match=r"it\.ckpt.*Bad CRC.*resume from another one"):
        load_file(path, "cpu", True)


RECORD_BYTES = 1 << 16


class UsersOwn:
    """A type that `torch.load` does not trust, with what pickles may have."""

    def __init__(self):
        self.entries, self.names, self.path = [1, {2: 3}], {"a", "b"}, Path("x")


class Run:
    """One run that keeps state in `folder`: a record, and checkpoints that refer to it."""

    def __init__(self, folder, planned=()):
        options = read_ssd_options({"path": str(folder / "ssd"), "budget": "64MiB", "checkpoint": "reference"})
        self.state = StateOnSsd(options, 64 << 20, planned, memory_of, HostEngine())
        self.record = self.state.state.reserve("record", RECORD_BYTES)

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
        self.state.restore(torch.load(path, weights_only=False)[KEY][SSD]["generation"])
        return self.value

    @property
    def value(self):
        return self.state.state.view(self.record).tensor((1,), torch.uint8)[0].item()

    @property
    def generations(self):
        return [each.number for each in self.state.store.generations()]


@pytest.fixture
def begins(tmp_path):
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


def test_another_runs_or_models_state_is_refused(begins, tmp_path):
    run = begins()
    run.save(tmp_path / "a.ckpt")
    run.state.close()
    with pytest.raises(ConfigError, match="which has no record `other`"):
        other = PlannedTensor(torch.empty(0), TensorRole.MOMENTUM, RECORD_BYTES, in_state=True)
        begins(planned=[PlannedRecord("other", "other", (other,))])
    states, entry = referring(begins(), tmp_path / "a.ckpt")
    states[0]["state"][0]["exp_avg"]["lightning_cxl_record"] = "other"
    with pytest.raises(CheckpointError, match=r"in record `other`, and .* has no record of this name"):
        whole(states, entry)


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
    assert run.state.flat(parameter, "head", TensorRole.MOMENTUM, torch.float32, 100).shape == (100,)
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
    tensor = run.record.take(torch.uint8, RECORD_BYTES)
    run.step(7)
    referred = refer([{"state": {0: {"exp_avg": OnSsd.of(run.record, tensor)}}, "param_groups": []}])
    with commit_beside(run.state, str(path)) as entry:
        torch.save({KEY: {SSD: entry}}, path)
    run.state.close()
    return referred, entry


@pytest.mark.parametrize("at", [0, RECORD_BYTES // 2, RECORD_BYTES - 1])
def test_state_becomes_a_tensor_and_damaged_state_does_not(begins, tmp_path, at):
    states, entry = referring(begins(), tmp_path / "a.ckpt")
    (data,) = (tmp_path / "ssd").glob("*.data")
    contents = bytearray(data.read_bytes())
    position = contents.index(bytes([7]) * RECORD_BYTES) + at
    contents[position] ^= 1
    data.write_bytes(contents)
    with pytest.raises(StorageError, match="record `record` is damaged"):
        whole(states, entry)
    contents[position] ^= 1
    data.write_bytes(contents)
    (plain,) = whole(states, entry)  # the folder is free again
    assert plain["state"][0]["exp_avg"].tolist() == [7] * RECORD_BYTES


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


@pytest.mark.parametrize("then", ["step", "save"])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_a_run_goes_on_where_a_generation_could_not_be_let_go_of(begins, tmp_path, monkeypatch, then, error):
    run = begins()
    run.step(1)
    run.save(tmp_path / "a.ckpt")
    run.step(2)
    settle_fails = StorageError("cannot write", errno=28)
    failing(monkeypatch, Folder, "write_new", 2, settle_fails)  # the manifest of the commit comes first
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
    failing(monkeypatch, Folder, "publish", 1, StorageError("cannot replace", errno=5))
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
