"""Checkpoints that are larger than memory, as those of state on SSD are, can be read."""

import os
from pathlib import Path

import pytest
import torch
from torch.utils.serialization import config

from lightning_cxl.errors import CheckpointError
from lightning_cxl.run import checkpoint as checkpoint_file
from lightning_cxl.run.checkpoint import load_file


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


@pytest.fixture
def large(tmp_path):
    """A checkpoint with more zeros than memory has room for, and a few other numbers."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    memory = sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("MemTotal", "SwapTotal")))
    zeros = torch.from_file(str(tmp_path / "zeros"), shared=True, size=memory + (1 << 30), dtype=torch.uint8)
    with open(tmp_path / "large.ckpt", "xb") as file, config.patch({"save.compute_crc32": False}):
        torch.save({"zeros": zeros, "numbers": torch.arange(1000.0)}, Sparse(file))
    (tmp_path / "zeros").unlink()
    return tmp_path / "large.ckpt"


def test_a_checkpoint_that_is_larger_than_memory_is_read(large):
    loaded = load_file(large, "cpu", True)
    assert loaded["zeros"].numel() > 1 << 30 and loaded["zeros"][-1] == 0
    assert torch.equal(loaded["numbers"], torch.arange(1000.0))
    loaded["numbers"].zero_()
    assert load_file(large, "cpu", True)["numbers"].any(), "what is written stays in memory"


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
