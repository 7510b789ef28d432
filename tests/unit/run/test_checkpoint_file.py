"""Checkpoint files: those with a copy of state on SSD are torch's own, larger than memory, and read without it."""

import errno
import io
import os
from pathlib import Path

import pytest
import torch
from torch.utils.serialization import config

from lightning_cxl.errors import CheckpointError, StorageError
from lightning_cxl.optim.swapped_state import OnSsd, StateSwapper, read_states
from lightning_cxl.run import checkpoint as checkpoint_file
from lightning_cxl.run.checkpoint import load_file, save_file
from lightning_cxl.storage.store import Store
from lightning_cxl.storage.swap import BufferPool, Swapper
from tests.integration.weight_memory import Peak
from tests.storage_cases import BUDGET, CHUNK, damage, folders, memory_of

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
    """Makes state on drives in the test's folder."""
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


def test_a_damaged_record_is_not_copied(state, tmp_path):
    run = state()
    damage(tmp_path / "drive0", at=run.records[2].record.versions[0] + 70)
    with pytest.raises(StorageError, match="record `record 2` is damaged"):
        run.save(tmp_path / "x.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["drive0"]


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


# -- reading files -----------------------------------------------------------------------------------------------------


class Sparse:
    """Writes a file of which the disk has little: large zeros are left out."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        if len(data) > 1 << 20:
            self.file.seek(len(data), os.SEEK_CUR)
        else:
            self.file.write(data)
        return len(data)

    def flush(self):
        self.file.flush()


def test_a_checkpoint_that_is_larger_than_memory_is_read(tmp_path):
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("MemTotal", "SwapTotal")))
    zeros = torch.from_file(str(tmp_path / "zeros"), shared=True, size=memory + (1 << 30), dtype=torch.uint8)
    path = tmp_path / "large.ckpt"
    with open(path, "xb") as file, config.patch({"save.compute_crc32": False}):
        torch.save({"zeros": zeros, "numbers": torch.arange(1000.0)}, Sparse(file))
    (tmp_path / "zeros").unlink()
    loaded = load_file(path, "cpu", True)
    assert loaded["zeros"].numel() > 1 << 30 and loaded["zeros"][-1] == 0
    assert torch.equal(loaded["numbers"], torch.arange(1000.0))
    loaded["numbers"].zero_()
    assert load_file(path, "cpu", True)["numbers"].any(), "what is written stays in memory"


def test_others_map_files_as_ever_meanwhile_and_afterwards(tmp_path, monkeypatch):
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


def test_a_file_that_cannot_be_mapped_is_not_called_damaged(tmp_path, monkeypatch):
    def refuses(fd, nbytes):
        raise OSError(19, "No such device")

    torch.save({"a": torch.ones(3)}, tmp_path / "it.ckpt")
    monkeypatch.setattr(checkpoint_file, "pages_of_file", refuses)
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
