"""Folders and devices of a store: whose they are, and what is refused."""

import errno
import logging
import os

import pytest

from lightning_cxl.errors import ConfigError, StorageError
from lightning_cxl.storage.drive import HEAD_BYTES, System
from lightning_cxl.storage.store import Store
from tests.storage_cases import BLOCK, BUDGET, Fails, data_file, folders, get, put


def committed(paths):
    """Leave a generation on drives; returns the bytes of its record."""
    store = Store(paths, budget_bytes=BUDGET, keeps=True)
    contents = put(store, store.reserve("state", 5 * BLOCK), 1)
    store.commit({"step": 1})
    store.close()
    return contents


def check_restored(paths, contents):
    store = Store(paths, budget_bytes=BUDGET, keeps=True)
    record = store.reserve("state", 5 * BLOCK)
    store.restore(1)
    assert get(store, record) == contents
    store.close()


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("role", ["first", "second"])
def test_a_folder_with_a_part_of_a_generation_is_not_taken(tmp_path, keeps, role):
    paths = folders(tmp_path, 2)
    contents = committed(paths)
    for part in paths:
        taken = [part] if role == "first" else [tmp_path / "another", part]
        if role == "first" and keeps and part == paths[0]:
            continue  # the home of the generation itself, which says that it has two drives
        with pytest.raises(ConfigError, match="holds"):
            Store(taken, budget_bytes=BUDGET, keeps=keeps)
    check_restored(paths, contents)


def test_drives_in_another_order_are_refused_and_nothing_is_lost(tmp_path):
    paths = folders(tmp_path, 3)
    contents = committed(paths)
    for others in ([paths[2], paths[1]], [tmp_path / "other", paths[2]]):
        with pytest.raises(StorageError, match="No such file"):
            Store([paths[0], *others], budget_bytes=BUDGET, keeps=True)
    check_restored(paths, contents)


def test_parts_of_a_run_that_was_killed_before_its_first_manifest_was_there_are_taken_by_the_next(tmp_path):
    paths = folders(tmp_path, 2)
    committed(paths)
    for name in ("manifest", "part"):
        (paths[0] / f"lightning_cxl-{name}.json").unlink()
    with pytest.raises(ConfigError, match="which is missing"):
        Store([paths[1]], budget_bytes=BUDGET)
    Store(paths, budget_bytes=BUDGET).close()
    assert {path.name for path in paths[1].iterdir()} == {"lightning_cxl.lock"}


@pytest.mark.parametrize("lost", ["home", "manifest", "part"])
def test_a_part_is_not_taken_where_its_home_or_manifest_is_missing_or_it_cannot_be_read(tmp_path, lost):
    paths, elsewhere = folders(tmp_path, 2), tmp_path / "elsewhere"
    contents = committed(paths)
    hidden = {"home": paths[0], "manifest": paths[0] / "lightning_cxl-manifest.json"}.get(lost)
    if hidden is None:
        (paths[1] / "lightning_cxl-part.json").write_text("{")
    else:
        hidden.rename(elsewhere)
    with pytest.raises(ConfigError, match="holds a part of a generation whose manifest is"):
        Store([paths[1]], budget_bytes=BUDGET)
    if hidden is not None:
        elsewhere.rename(hidden)
    check_restored(paths, contents)


def test_the_name_of_a_new_folder_lies_on_the_disk(tmp_path):
    synced = []
    system = Fails("sync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    for is_new in (True, False):
        Store(folders(tmp_path), budget_bytes=BUDGET, system=system).close()
        assert (str(tmp_path) in synced) == is_new
        synced.clear()


def test_a_vanished_file_is_found_at_the_commit(tmp_path):
    store = Store([tmp_path], budget_bytes=BUDGET, keeps=True)
    put(store, store.reserve("state", BLOCK), 1)
    (file,) = tmp_path.glob("*.data")
    file.unlink()
    with pytest.raises(StorageError, match=r"cannot find.*ENOENT"):
        store.commit({})
    file.touch()
    with pytest.raises(StorageError, match="another file"):
        store.commit({})
    store.close()


def test_space_is_taken_when_a_record_is_reserved(tmp_path):
    def full(fd, offset, nbytes):
        if offset + nbytes > HEAD_BYTES + 8 * BLOCK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = Store([tmp_path], budget_bytes=BUDGET, system=Fails("allocate", full))
    first = store.reserve("first", 6 * BLOCK)
    with pytest.raises(StorageError, match=r"cannot take .*ENOSPC.*smaller budget") as caught:
        store.reserve("second", 3 * BLOCK)
    assert caught.value.errno == errno.ENOSPC and store.stats()["reserved_bytes"] == 6 * BLOCK
    second = store.reserve("second", 2 * BLOCK)
    wrote = {record: put(store, record, seed) for seed, record in enumerate((first, second))}
    assert {record: get(store, record) for record in wrote} == wrote
    assert data_file(tmp_path).stat().st_blocks * 512 >= HEAD_BYTES + 8 * BLOCK
    store.close()


@pytest.mark.parametrize("when", ["open", "read"])
def test_a_filesystem_that_refuses_direct_transfers_is_used_through_its_cache(tmp_path, caplog, when):
    direct = set()

    def refuse(is_direct):
        if is_direct:
            raise OSError(errno.EINVAL, "Invalid argument")

    class Refuses(System):
        def open(self, path, flags):
            refuse(flags & os.O_DIRECT and when == "open")
            fd = super().open(path, flags)
            direct.discard(fd)
            if flags & os.O_DIRECT:
                direct.add(fd)
            return fd

        def preadv(self, fd, views, offset):
            refuse(fd in direct)
            return super().preadv(fd, views, offset)

    with caplog.at_level(logging.WARNING):
        store = Store([tmp_path], budget_bytes=BUDGET, system=Refuses())
        record = store.reserve("state", 5 * BLOCK)
        contents = put(store, record, 1)
        assert get(store, record) == contents
        store.close()
    assert [entry.message.count("O_DIRECT") for entry in caplog.records] == [1]


@pytest.mark.parametrize("num_drives", [1, 2])
def test_a_missing_manifest_lets_nobody_delete_the_data(tmp_path, num_drives):
    paths = folders(tmp_path, num_drives)
    contents = committed(paths)
    manifest = paths[0] / "lightning_cxl-manifest.json"
    manifest.rename(tmp_path / "lost")
    for keeps in (True, False):
        with pytest.raises(ConfigError, match=r"whose manifest is .*missing.* back from a backup"):
            Store(paths, budget_bytes=BUDGET, keeps=keeps)
    (tmp_path / "lost").rename(manifest)
    check_restored(paths, contents)


def test_a_link_as_lock_a_filesystem_that_takes_no_space_in_advance_and_a_long_name_are_refused(tmp_path):
    def no_space(*args):
        raise OSError(errno.EINVAL, "Invalid argument")  # so does libc on ext2

    (tmp_path / "mine").write_text("kept")
    (tmp_path / "lightning_cxl.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(StorageError, match="It is a link: remove the link"):
        Store([tmp_path], budget_bytes=BUDGET)
    assert (tmp_path / "mine").read_text() == "kept"
    with pytest.raises(StorageError, match="cannot take space in advance: use ext4, XFS or btrfs"):
        Store([tmp_path / "ext2"], budget_bytes=BUDGET, system=Fails("allocate", no_space))
    with pytest.raises(StorageError, match="shorter path"):
        Store([tmp_path / ("x" * 300)], budget_bytes=BUDGET)
