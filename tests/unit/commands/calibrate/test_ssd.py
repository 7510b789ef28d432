"""Disks: on whatever file system the tests run, and where O_DIRECT is refused."""

import errno
import os
import threading

import pytest

from lightning_cxl.commands import calibrate
from lightning_cxl.commands.calibrate import measure_ssd
from lightning_cxl.errors import ConfigError


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(calibrate, "_BLOCK_BYTES", 1 << 20)


@pytest.mark.parametrize("nbytes", [1 << 20, 5 << 20, 8 << 20])
def test_a_folder_is_measured_and_left_as_it_was(tmp_path, nbytes):
    (tmp_path / "mine").write_text("kept")
    read, write, _ = measure_ssd(tmp_path, nbytes)
    assert read.value > 0 and write.value > 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def recorded(monkeypatch, name):
    """Return the (buffer, offset) of every call."""
    calls, real, lock = [], getattr(os, name), threading.Lock()

    def access(file, buffers, offset):
        with lock:
            calls.append((id(buffers[0]), offset))
        return real(file, buffers, offset)

    monkeypatch.setattr(os, name, access)
    return calls


def test_every_block_is_written_and_read_once_a_round(tmp_path, monkeypatch):
    written, read = recorded(monkeypatch, "pwritev"), recorded(monkeypatch, "preadv")
    measure_ssd(tmp_path, 6 << 20)
    blocks = [index << 20 for index in range(6)]
    assert sorted(offset for _, offset in read) == sorted(blocks * 3)
    assert sorted(offset for _, offset in written) == sorted(blocks * 4)  # once more, to find room
    assert len({buffer for buffer, _ in read}) == 4


def test_without_direct_access_the_answer_says_so(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    assert not measure_ssd(tmp_path, 1 << 20)[2]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda file, buffers, offset: 17)
    with pytest.raises(ConfigError, match=r"could not be written and read: .*17 of 1048576 bytes at"):
        measure_ssd(tmp_path, 4 << 20)
    assert list(tmp_path.iterdir()) == []
