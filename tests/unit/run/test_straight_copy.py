"""Checkpoints with a copy of state on SSD: torch's own files, made from the drives."""

import errno
import io
import os
import zipfile
from pathlib import Path

import pytest
import torch
from torch.utils.serialization import config

from lightning_cxl.errors import CheckpointError, StorageError, TierFullError
from lightning_cxl.optim.state_visits import StateVisits
from lightning_cxl.run.checkpoint_file import load_file, save_file
from lightning_cxl.run.straight_copy import copying_from
from lightning_cxl.run.zip_checksums import put_checksums
from lightning_cxl.storage.record_copy import RecordCopy
from lightning_cxl.storage.slots import HostSlots
from lightning_cxl.storage.store import Store
from lightning_cxl.storage.system import System
from tests.reflinks import filesystem_with_reflinks
from tests.storage_cases import BLOCK, BUDGET, CHUNK, data_file, folders, memory_of

NUMELS = (5 * 1024, 3000, 1, 2048)  # of the tensors of each record; 3000 is no whole number of blocks
NBYTES = sum(-(-4 * numel // 64) * 64 for numel in NUMELS)


class State:
    """State of four parameters in four records, updated once; and the checkpoint that a run would make of it."""

    def __init__(self, paths, slots=2, **options):
        self.store = Store(paths, budget_bytes=BUDGET, chunk_bytes=CHUNK, **options)
        self.visits = StateVisits(self.store, HostSlots(memory_of, 0), lambda: None)
        self.records = [self.visits.reserve(f"record {number}", NBYTES) for number in range(4)]
        self.visits._slots.cap_bytes = slots * self.records[0].record.padded_nbytes
        self.expected, entries = {}, {}
        for number, record in enumerate(self.records):
            tensors = [record.take(torch.float32, numel) for numel in NUMELS]
            entries[number] = {"step": torch.tensor(3.0), **{f"s{i}": each for i, each in enumerate(tensors)}}
            with self.visits.visit([record]) as visit:
                for tensor in tensors:
                    visit.at_slot(tensor).normal_()
                values = [visit.at_slot(tensor).clone() for tensor in tensors]
            self.expected[number] = {"step": torch.tensor(3.0), **{f"s{i}": each for i, each in enumerate(values)}}
        self.visits.wait()
        self.weights = {"w": torch.randn(100, 100), "b": torch.randn(7), "none": torch.zeros(0)}
        self.checkpoint = self.with_state(entries)

    def with_state(self, entries):
        return {"state_dict": self.weights, "optimizer_states": [{"state": entries, "param_groups": []}], "epoch": 1}

    def save(self, path):
        with copying_from(self.visits):
            save_file(self.checkpoint, path)

    def check(self, loaded):
        entries = loaded["optimizer_states"][0]["state"]
        assert entries.keys() == self.expected.keys() and loaded["epoch"] == 1
        for expected, got in [(self.weights, loaded["state_dict"]), *((self.expected[n], entries[n]) for n in entries)]:
            assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.fixture
def state(tmp_path):
    """Makes state on drives in the test's folder."""
    made = []

    def make(drives=1, **options):
        made.append(State(folders(tmp_path, drives), **options))
        return made[-1]

    yield make
    for each in made:
        each.visits.close()
        each.store.close()


@pytest.mark.timeout(60)  # who waits for a slot of its own waits for ever
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("drives", [1, 3])
def test_a_file_is_the_one_that_torch_would_write(state, tmp_path, drives, slots):
    run, theirs = state(drives, slots=slots), io.BytesIO()
    run.save(tmp_path / "x.ckpt")
    with config.patch({"save.storage_alignment": BLOCK}):
        torch.save(run.with_state(run.expected), theirs)
    ours = (tmp_path / "x.ckpt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(ours)) as our_zip, zipfile.ZipFile(theirs) as their_zip:
        assert our_zip.testzip() is None
        for our, their in zip(our_zip.infolist(), their_zip.infolist(), strict=True):
            assert our.filename == their.filename and our.header_offset == their.header_offset
            if not our.filename.endswith("serialization_id"):
                assert our.CRC == their.CRC and our_zip.read(our) == their_zip.read(their)
        last = our_zip.getinfo("archive/.data/serialization_id").header_offset
    assert ours[:last] == theirs.getvalue()[:last]
    run.check(torch.load(tmp_path / "x.ckpt", weights_only=True))
    run.check(torch.load(tmp_path / "x.ckpt", weights_only=True, mmap=True))
    run.check(load_file(tmp_path / "x.ckpt", "cpu", True))


def test_each_record_is_read_once_and_torch_reads_none(state, tmp_path, monkeypatch):
    run = state(slots=3)
    put, parts = RecordCopy.put, []

    def noting(copy, record, memory, start, nbytes, at):
        parts.append(nbytes)
        assert not config.save.compute_crc32, "torch reads windows for its checksums"
        return put(copy, record, memory, start, nbytes, at)

    monkeypatch.setattr(RecordCopy, "put", noting)
    before, late = run.store.stats()["read_bytes"], run.visits.num_late
    run.save(tmp_path / "x.ckpt")
    assert run.store.stats()["read_bytes"] - before == 4 * run.records[0].record.padded_nbytes
    assert run.visits.num_late - late == 1, "all but the first are read ahead"
    assert parts == 4 * [4 * numel for numel in NUMELS]


def test_a_file_that_shares_blocks_is_the_same(tmp_path):
    with filesystem_with_reflinks(tmp_path) as folder:
        run = State([folder / "drive"])
        run.save(folder / "x.ckpt")
        for record in run.records:
            with run.visits.visit([record]) as visit:
                visit.places[0][1].tensor((visit.places[0][1].nbytes,), torch.uint8).zero_()
        run.visits.wait()
        run.check(torch.load(folder / "x.ckpt", weights_only=True))
        with zipfile.ZipFile(folder / "x.ckpt") as archive:
            assert archive.testzip() is None
        run.visits.close()
        run.store.close()


def test_what_someone_writes_while_it_is_saved_is_in_the_file(state, tmp_path):
    run = state()
    with copying_from(run.visits):
        run.checkpoint["optimizer_states"][0]["state"][2]["s0"].fill_(5)
        run.expected[2]["s0"].fill_(5)
        save_file(run.checkpoint, tmp_path / "x.ckpt")
    run.check(torch.load(tmp_path / "x.ckpt", weights_only=True))


def test_what_someone_wrote_before_is_in_the_file(state, tmp_path):
    run = state()
    run.checkpoint["optimizer_states"][0]["state"][1]["s1"].fill_(6)
    run.expected[1]["s1"].fill_(6)
    run.save(tmp_path / "x.ckpt")
    assert not run.records[1].is_dirty(), "it was written to the drive first"
    run.check(torch.load(tmp_path / "x.ckpt", weights_only=True))


def test_state_that_no_update_has_written_is_what_its_window_shows(state, tmp_path):
    run = state()
    record = run.visits.reserve("new", NBYTES)
    run.checkpoint["optimizer_states"][0]["state"][4] = {"s0": record.take(torch.float32, 2048)}
    run.expected[4] = {"s0": torch.zeros(2048)}
    run.save(tmp_path / "x.ckpt")
    run.check(torch.load(tmp_path / "x.ckpt", weights_only=True))


def test_a_damaged_record_is_not_copied(state, tmp_path):
    run = state()
    with open(data_file(tmp_path / "drive0"), "r+b") as file:
        offset = run.records[2].record.versions[0] + 70
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    with pytest.raises(StorageError, match="record `record 2` is damaged"):
        run.save(tmp_path / "x.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["drive0"]


@pytest.mark.parametrize("failure", ["direct write", "other write", "sync"])
def test_after_a_full_disk_nothing_is_left_and_the_run_goes_on(state, tmp_path, monkeypatch, failure):
    run, fsync = state(slots=1), os.fsync
    full = OSError(errno.ENOSPC, "No space left on device")

    def no_space(*args):
        if failure != "sync" or os.readlink(f"/proc/self/fd/{args[0]}").endswith(".partial"):
            raise full
        fsync(*args)

    with monkeypatch.context() as patch:
        if failure == "direct write":
            put = System.pwritev
            target = "x.ckpt"

            def some(system, fd, views, offset):
                if target in os.readlink(f"/proc/self/fd/{fd}"):
                    raise full
                return put(system, fd, views, offset)

            patch.setattr(System, "pwritev", some)
        elif failure == "other write":
            patch.setattr("lightning_cxl.run.straight_copy.RecordCopy.put", no_space)
        else:
            patch.setattr(os, "fsync", no_space)
        with pytest.raises(CheckpointError, match="No space left"):
            run.save(tmp_path / "x.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["drive0"]
    with run.visits.visit([run.records[0]]) as visit:
        visit.places[0][1].tensor((1,), torch.uint8).zero_()
    run.visits.wait()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TierFullError("no memory for slots")])
def test_what_ends_a_save_is_said_and_not_how_torch_ends_the_file(state, tmp_path, monkeypatch, error):
    run = state()

    def ends(*args):
        raise error

    monkeypatch.setattr(RecordCopy, "put", ends)
    with pytest.raises(type(error)) as caught:
        run.save(tmp_path / "x.ckpt")
    assert caught.value is error
    assert [path.name for path in tmp_path.iterdir()] == ["drive0"]


def test_a_full_disk_is_said_also_where_no_state_is_on_ssd(tmp_path, monkeypatch):
    """Torch ends a file whose write has failed with an error about positions."""

    class Full(io.BytesIO):
        def write(self, data):
            if len(data) > 1000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    (tmp_path / "partial").touch()
    monkeypatch.setattr("lightning_cxl.run.checkpoint_file.open_partial", lambda target: (Full(), tmp_path / "partial"))
    with pytest.raises(CheckpointError, match="No space left"):
        save_file({"weights": torch.ones(1000)}, tmp_path / "x.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_filesystem_that_also_refuses_to_remove_the_file_is_said_by_its_first_error(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CheckpointError, match="Read-only"):
        save_file({}, tmp_path / "x.ckpt")


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not write checkpoint"):
        save_file({}, tmp_path / "file" / "folder" / "x.ckpt")


@pytest.mark.parametrize("known", ["none", "all", "empty"])
def test_checksums_are_put_where_readers_look(tmp_path, known):
    tensors = {"a": torch.randn(3000), "none": torch.zeros(0), "b": torch.randn(10)}
    checked = io.BytesIO()
    torch.save(tensors, checked)
    with open(tmp_path / "file", "x+b") as file:
        with config.patch({"save.compute_crc32": False}):
            torch.save(tensors, file)
        with zipfile.ZipFile(checked) as archive:
            entries = archive.infolist()
        positions = {(0, 0): 1}
        if known == "all":
            for each in entries[:-1]:
                start = checked.getvalue().index(archive_data(checked, each), each.header_offset)
                positions[start, each.file_size] = each.CRC
        put_checksums(file, {} if known == "empty" else positions)
        file.write(b"")
        assert file.tell() == os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(tmp_path / "file") as archive:
        assert archive.testzip() is None
    ours, last = (tmp_path / "file").read_bytes(), entries[-1].header_offset
    assert ours[:last] == checked.getvalue()[:last]


def archive_data(file, entry):
    with zipfile.ZipFile(file) as archive:
        return archive.read(entry)
