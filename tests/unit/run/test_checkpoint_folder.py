"""Folders that are being written, with others beside them, on filesystems with and without locks and exchanges."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from lightning_cxl.run import checkpoint as checkpoint_folder
from lightning_cxl.run.checkpoint import is_sharded_checkpoint, lying_at, put_in_place, remove, unfinished


@pytest.fixture(params=["locks", "no locks"])
def locks(request, monkeypatch):
    """Run with and without locks."""
    if request.param == "no locks":
        without_locks(monkeypatch)
    return request.param == "locks"


@pytest.fixture(params=["exchange", "no exchange"])
def exchanges(request, monkeypatch):
    """Run where two names can change places, and where not."""
    if request.param == "no exchange":
        monkeypatch.setattr(checkpoint_folder, "exchange", lambda one, other: False)
    return request.param == "exchange"


def without_locks(monkeypatch):
    def flock(fd, operation):
        raise OSError(errno.EBADF, "Bad file descriptor")  # as on NFS, for a folder

    monkeypatch.setattr(checkpoint_folder.fcntl, "flock", flock)


def write(path, number):
    """Do what a save does, in one process."""
    with unfinished(path) as folder:
        (folder / "meta.pt").write_text(str(number))
        put_in_place(folder, path)


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def number_at(path):
    return int((lying_at(path) / "meta.pt").read_text())


def test_a_folder_has_its_name_when_it_is_complete(tmp_path, locks, exchanges):
    path = tmp_path / "deep" / "a.ckpt"
    write(path, 1)
    with unfinished(path) as folder:
        assert folder.parent == path.parent and number_at(path) == 1
        (folder / "meta.pt").write_text("2")
        put_in_place(folder, path)
    assert number_at(path) == 2 and names(path.parent) == ["a.ckpt"]
    remove(path)
    assert names(path.parent) == []


class Another:
    """A save elsewhere that comes to look for what was left, just before this one locks its new folder."""

    def __init__(self, monkeypatch, folder, wins):
        self.taken: list[Path] = []
        self._folder, self._wins, self._lock = folder, wins, fcntl.flock
        monkeypatch.setattr(checkpoint_folder.fcntl, "flock", self.flock)

    def flock(self, fd, operation):
        found = [] if self.taken or operation == fcntl.LOCK_UN else list(self._folder.glob(".*.partial"))
        for path in found:
            self.taken.append(path)
            other = os.open(path, os.O_RDONLY)
            try:
                self._lock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._wins == "removes it":
                    path.rmdir()
                    os.close(other)
                    other = -1
                self._lock(fd, operation)
            finally:
                if other >= 0:
                    path.rmdir()
                    os.close(other)
        if not found:
            self._lock(fd, operation)


@pytest.mark.parametrize("wins", ["removes it", "has locked it"])
def test_who_loses_its_new_folder_takes_another_one(tmp_path, monkeypatch, wins):
    another = Another(monkeypatch, tmp_path, wins)
    path = tmp_path / "a.ckpt"
    with unfinished(path) as folder:
        assert another.taken and folder not in another.taken and folder.is_dir()
        with unfinished(tmp_path / "b.ckpt"):  # a third one: it leaves the folder alone
            pass
        assert folder.is_dir()
        put_in_place(folder, path)
    assert [name for name in names(tmp_path) if not name.startswith(".b")] == ["a.ckpt"]


def test_a_new_folder_that_is_gone_before_it_is_opened(tmp_path, monkeypatch):
    usual, taken = Path.mkdir, []

    def mkdir(path, *args, **keywords):
        usual(path, *args, **keywords)
        if path.name.endswith(".partial") and not taken:
            taken.append(path)
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    write(tmp_path / "a.ckpt", 1)
    assert taken and names(tmp_path) == ["a.ckpt"]


def test_many_saves_beside_each_other(tmp_path):
    """Two at a time, each looking for what is left all the time."""
    errors = []

    def save(name):
        try:
            for number in range(60):
                write(tmp_path / name, number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(f"{name}.ckpt",)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and names(tmp_path) == ["a.ckpt", "b.ckpt"]
    assert (number_at(tmp_path / "a.ckpt"), number_at(tmp_path / "b.ckpt")) == (59, 59)


class KilledError(BaseException):
    """Stands for the kernel that ends the process."""


def killed_at(monkeypatch, call, act):
    """Do something, and die at one of its renames or removals; return whether it came so far."""
    count = 0

    def dying(usual):
        def step(*args, **keywords):
            nonlocal count
            count += 1
            if count > call:
                raise KilledError
            return usual(*args, **keywords)

        return step

    with monkeypatch.context() as patch:
        for owner, name in ((os, "rename"), (Path, "rename"), (checkpoint_folder.shutil, "rmtree")):
            patch.setattr(owner, name, dying(getattr(owner, name)))
        try:
            act()
        except KilledError:
            return True
    return False


@pytest.mark.parametrize("again", ["a.ckpt", "b.ckpt"])
def test_a_kill_at_any_step_leaves_a_checkpoint_that_is_found(tmp_path, monkeypatch, locks, exchanges, again):
    for call in range(9):
        folder = tmp_path / str(call)
        path = folder / "a.ckpt"
        write(path, 1)
        died = killed_at(monkeypatch, call, lambda path=path: write(path, 2))
        assert number_at(path) in (1, 2)
        assert len([name for name in names(folder) if not name.startswith(".")]) in (1, 2)
        found = number_at(path)
        write(folder / again, 3)
        if again == "a.ckpt":
            assert number_at(path) == 3 and [n for n in names(folder) if not n.startswith(".")] == ["a.ckpt"]
        else:
            assert number_at(path) == found
        if locks:
            assert not [name for name in names(folder) if name.startswith(".")]
        if not died:
            return
    pytest.fail("there are more steps than were tried")


def test_what_is_being_replaced_is_found_where_lightning_looks_for_the_last_one(tmp_path, monkeypatch):
    from lightning.pytorch.callbacks import ModelCheckpoint

    monkeypatch.setattr(checkpoint_folder, "exchange", lambda one, other: False)
    write(tmp_path / "last.ckpt", 1)
    assert killed_at(monkeypatch, 1, lambda: write(tmp_path / "last.ckpt", 2))
    assert not (tmp_path / "last.ckpt").exists()
    saving = ModelCheckpoint(tmp_path, save_last=True)
    assert {Path(each).name for each in saving._find_last_checkpoints(None)} == {lying_at(tmp_path / "last.ckpt").name}


def test_a_path_without_a_name_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not is_sharded_checkpoint(Path("."))
    assert not is_sharded_checkpoint(Path("/"))
    write(tmp_path / "a.ckpt", 1)
    monkeypatch.chdir(tmp_path / "a.ckpt")
    assert is_sharded_checkpoint(Path("."))


def test_what_a_crash_has_left_under_another_name_is_removed_by_its_own(tmp_path):
    write(tmp_path / "a.being_replaced.ckpt", 1)
    assert number_at(tmp_path / "a.ckpt") == 1
    remove(tmp_path / "a.ckpt")
    assert names(tmp_path) == []


def test_a_checkpoint_is_written_where_the_one_before_cannot_be_removed(tmp_path, monkeypatch, caplog):
    def fails(path):
        raise OSError(errno.EACCES, "Permission denied")

    write(tmp_path / "a.ckpt", 1)
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", fails)
    write(tmp_path / "a.ckpt", 2)
    assert number_at(tmp_path / "a.ckpt") == 2
    assert "could not be removed" in caplog.text
