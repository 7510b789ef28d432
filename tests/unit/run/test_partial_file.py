"""What a run that was killed while it saved has left is removed by the next save there, and nothing else is."""

import errno
import fcntl
import os
import signal

import pytest
import torch

from lightning_cxl.run import checkpoint as partial_file
from lightning_cxl.run.checkpoint import remove_left, save_file, unfinished

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Stops:
    """Stops its process when it is saved."""

    def __init__(self, says):
        self.says = says

    def __reduce__(self):
        os.write(self.says, b"x")
        signal.pause()


@pytest.fixture
def saving(tmp_path):
    """A process that is in the middle of saving `one.ckpt`."""
    started, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_file({"weights": torch.ones(1 << 12), "stops": Stops(says)}, tmp_path / "one.ckpt")
        finally:
            os._exit(1)
    os.read(started, 1)
    yield child
    for end in (started, says):
        os.close(end)
    if os.waitpid(child, os.WNOHANG) == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_next_save_removes_what_a_killed_run_has_left(tmp_path, saving, caplog):
    (left,) = names(tmp_path)
    os.kill(saving, signal.SIGKILL)
    os.waitid(os.P_PID, saving, os.WEXITED | os.WNOWAIT)
    with caplog.at_level("INFO"):
        save_file({}, tmp_path / "two.ckpt")
    assert names(tmp_path) == ["two.ckpt"]
    assert left in caplog.text


def test_what_another_run_is_writing_stays(tmp_path, saving):
    (written,) = names(tmp_path)
    save_file({}, tmp_path / "two.ckpt")
    assert names(tmp_path) == [written, "two.ckpt"]


def test_what_this_process_is_writing_stays(tmp_path):
    with unfinished(tmp_path / "one.ckpt", is_file=True) as path:
        remove_left(tmp_path)
        assert path.exists()
    remove_left(tmp_path)
    assert not path.exists()


def test_files_of_others_stay(tmp_path):
    others = [
        ".one.ckpt.checkpoint.partial", ".one.ckpt.123.partial", "one.ckpt.0123abcd.checkpoint.partial",
        ".one.ckpt.0123abcd.checkpoint.partial.bak", ".one.ckpt.0123abcX.checkpoint.partial",
    ]  # fmt: skip
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / "elsewhere").touch()
    (tmp_path / ".link.0123abcd.checkpoint.partial").symlink_to(tmp_path / "elsewhere")
    before = names(tmp_path)
    remove_left(tmp_path)
    assert names(tmp_path) == before


def test_a_file_has_its_name_before_its_lock_ends(tmp_path, monkeypatch):
    replace = os.replace

    def others_clean(old, new):
        remove_left(tmp_path)
        replace(old, new)

    monkeypatch.setattr(os, "replace", others_clean)
    save_file({"a": 1}, tmp_path / "one.ckpt")
    assert torch.load(tmp_path / "one.ckpt", weights_only=True) == {"a": 1}
    assert names(tmp_path) == ["one.ckpt"]


@pytest.mark.parametrize("name", ["x" * 255, "\N{GRINNING FACE}" * 63], ids=["letters", "pictures"])
def test_a_name_may_be_as_long_as_the_filesystem_takes(tmp_path, name):
    (tmp_path / name).touch()
    with unfinished(tmp_path / name, is_file=True) as path:
        assert path.exists()
    remove_left(tmp_path)
    assert not path.exists()
    save_file({}, tmp_path / name)
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("when", ["before the lock", "behind the lock of another"])
def test_a_file_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch, when):
    flock, calls = fcntl.flock, []

    def removed_first(file, how):
        calls.append(how)
        if len(calls) == 1:
            (path,) = tmp_path.iterdir()
            if when == "behind the lock of another":
                raise BlockingIOError(errno.EWOULDBLOCK, "locked")
            path.unlink()
        flock(file, how)

    monkeypatch.setattr(partial_file.fcntl, "flock", removed_first)
    with unfinished(tmp_path / "one.ckpt", is_file=True) as path:
        assert path.exists()
        assert len(calls) == 2


def test_where_nothing_can_be_locked_nothing_is_removed(tmp_path, monkeypatch):
    def refuses(file, how):
        raise OSError(errno.ENOLCK, "no locks")

    with monkeypatch.context() as patch:
        patch.setattr(partial_file.fcntl, "flock", refuses)
        with unfinished(tmp_path / "one.ckpt", is_file=True) as path:
            (tmp_path / ".one.ckpt.0123abcd.checkpoint.partial").touch()
            remove_left(tmp_path)
            assert len(names(tmp_path)) == 2
    remove_left(tmp_path)  # locks work again
    assert names(tmp_path) == [path.name]
