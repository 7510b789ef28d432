"""What processes that have ended have left in their folders, and what nobody may remove."""

import pytest

from lightning_cxl.storage.drive import Folder, System, make_parents, remove_left
from lightning_cxl.storage.store import Store

DATA = "lightning_cxl-0123456789abcdef-0.data"


def left_in(folder):
    folder.mkdir(parents=True)
    (folder / DATA).write_bytes(b"x")
    return folder / DATA


def test_data_of_processes_that_have_ended_is_removed(tmp_path):
    left = left_in(tmp_path / "rank-12")
    users = [left_in(tmp_path / name) for name in ("rank-x", "mine")]
    (left.parent / "notes.txt").write_text("")
    remove_left([tmp_path, tmp_path / "not there"])
    assert not left.exists() and (left.parent / "notes.txt").exists()
    assert all(each.exists() for each in users)


def test_what_a_process_uses_stays(tmp_path):
    left = left_in(tmp_path / "rank-0")
    held = Folder(left.parent, System())
    try:
        remove_left([tmp_path])
    finally:
        held.close()
    assert left.exists()


def test_a_generation_stays(tmp_path):
    store = Store([tmp_path / "rank-0", tmp_path / "rank-1"], budget_bytes=1 << 20, keeps=True)
    store.reserve("it", 8)
    store.commit({})
    store.close()
    before = sorted(tmp_path.glob("*/*"))
    remove_left([tmp_path])
    assert sorted(tmp_path.glob("*/*")) == before and any(each.suffix == ".data" for each in before)


def test_a_folder_that_cannot_be_cleaned_is_named_and_hinders_nobody(tmp_path, monkeypatch, caplog):
    left = left_in(tmp_path / "rank-0")

    def refuse(self, path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(System, "unlink", refuse)
    remove_left([tmp_path])
    assert left.exists() and str(left.parent) in caplog.text


def test_what_a_drive_is_mounted_at_is_not_made(tmp_path):
    make_parents([tmp_path / "run" / "rank-0"])
    make_parents([tmp_path / "run" / "rank-1"])
    assert (tmp_path / "run").is_dir() and (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    with pytest.raises(OSError, match="cannot make folder"):
        make_parents([tmp_path / "not mounted" / "run" / "rank-0"])
