import errno
import fcntl
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from lightning_cxl.run import checkpoint as checkpoint_folder
from lightning_cxl.run.checkpoint import is_sharded_checkpoint, lying_at, remove, remove_left, save_file, unfinished


def without_locks(monkeypatch):
    as_on_nfs = Mock(side_effect=OSError(errno.EBADF, "Bad file descriptor"))  # for a folder
    monkeypatch.setattr(checkpoint_folder.fcntl, "flock", as_on_nfs)


def write(path, number):
    with unfinished(path) as folder:
        (folder / "meta.pt").write_text(str(number))
        checkpoint_folder.take_place(folder, path)


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def number_at(path):
    return int((lying_at(path) / "meta.pt").read_text())


@pytest.mark.parametrize("is_file", [False, True], ids=["a folder", "a file"])
@pytest.mark.parametrize("when", ["before it is opened", "before it is locked", "behind the lock of another"])
def test_who_loses_what_it_has_just_made_makes_another(tmp_path, monkeypatch, when, is_file):
    """A save elsewhere has looked for what killed runs left, and taken it for such."""
    owner, call = (os, "open") if when == "before it is opened" else (fcntl, "flock")
    usual, lost = getattr(owner, call), []

    def loses_first(*args, **keywords):
        if not lost and (made := list(tmp_path.iterdir())):
            lost.extend(made)
            if when == "behind the lock of another":
                raise BlockingIOError(errno.EWOULDBLOCK, "locked")
            remove(made[0])
        return usual(*args, **keywords)

    monkeypatch.setattr(owner, call, loses_first)
    with unfinished(tmp_path / "a.ckpt", is_file=is_file) as path:
        assert lost and path not in lost and path.is_file() == is_file and path.exists()


@pytest.mark.parametrize("before", ["a file", "a link", "a link to nothing"])
def test_what_has_the_name_is_replaced(tmp_path, before):
    path, aim = tmp_path / "last.ckpt", tmp_path / "step=1.ckpt"
    write(aim, 1)
    if before == "a file":
        path.write_bytes(b"x")
    else:
        path.symlink_to(aim.name if before == "a link" else "gone")
    write(path, 2)
    assert number_at(path) == 2 and not path.is_symlink() and number_at(aim) == 1
    assert names(tmp_path) == ["last.ckpt", "step=1.ckpt"]


def left_by_a_kill(folder, name):
    left = folder / f".{name}.partial"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"x")
    return left


def test_folders_that_killed_runs_have_left_are_removed_and_nothing_else(tmp_path):
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
    assert written.is_dir() and users.is_dir() and number_at(tmp_path / "a.ckpt") == 1
    crashed = tmp_path / "crashed"
    write(crashed / "a.being_replaced.ckpt", 1)
    assert number_at(crashed / "a.ckpt") == 1
    remove(crashed / "a.ckpt")
    assert names(crashed) == [], "it is removed by the name that it would have had"


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


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("exchanges", [True, False])  # whether two names can change places
@pytest.mark.parametrize("again", ["a.ckpt", "b.ckpt"])
def test_a_kill_at_any_step_leaves_a_checkpoint_that_is_found(tmp_path, monkeypatch, locks, exchanges, again):
    if not locks:
        without_locks(monkeypatch)
    if not exchanges:
        monkeypatch.setattr(checkpoint_folder, "exchange", lambda one, other: False)
    for call in range(9):
        folder = tmp_path / str(call)
        path = folder / "a.ckpt"
        write(path, 1)
        died = killed_at(monkeypatch, call, lambda path=path: write(path, 2))
        assert number_at(path) == 2 or (died and number_at(path) == 1)
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


def test_a_checkpoint_is_removed_at_once(tmp_path, monkeypatch):
    write(tmp_path / "a.ckpt", 1)
    assert killed_at(monkeypatch, 2, lambda: remove(tmp_path / "a.ckpt")), "behind the rename"
    (left,) = names(tmp_path)
    assert left.startswith(".a.ckpt.") and left.endswith(".partial")
    write(tmp_path / "b.ckpt", 1)
    assert names(tmp_path) == ["b.ckpt"]


def test_a_path_without_a_name_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not is_sharded_checkpoint(Path("."))
    assert not is_sharded_checkpoint(Path("/"))
    write(tmp_path / "a.ckpt", 1)
    monkeypatch.chdir(tmp_path / "a.ckpt")
    assert is_sharded_checkpoint(Path("."))


def test_a_checkpoint_is_written_where_the_one_before_cannot_be_removed(tmp_path, monkeypatch, caplog):
    write(tmp_path / "a.ckpt", 1)
    fails = Mock(side_effect=OSError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", fails)
    write(tmp_path / "a.ckpt", 2)
    assert number_at(tmp_path / "a.ckpt") == 2
    assert "could not be removed" in caplog.text


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


@pytest.mark.parametrize("name", ["one.ckpt", "x" * 255, "\N{GRINNING FACE}" * 63], ids=["short", "long", "pictures"])
def test_what_this_process_is_writing_stays_whatever_its_name(tmp_path, name):
    """A name may be as long as the filesystem takes."""
    (tmp_path / name).touch()
    with unfinished(tmp_path / name, is_file=True) as path:
        remove_left(tmp_path)
        assert path.exists()
    remove_left(tmp_path)
    assert not path.exists()
    save_file({}, tmp_path / name)
    assert names(tmp_path) == [name]


def test_where_nothing_can_be_locked_nothing_is_removed(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        without_locks(patch)
        with unfinished(tmp_path / "one.ckpt", is_file=True) as path:
            (tmp_path / ".one.ckpt.0123abcd.checkpoint.partial").touch()
            remove_left(tmp_path)
            assert len(names(tmp_path)) == 2
    remove_left(tmp_path)  # locks work again
    assert names(tmp_path) == [path.name]
