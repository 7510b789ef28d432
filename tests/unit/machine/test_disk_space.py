import os
from types import SimpleNamespace

import pytest

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine import topology as disk_space
from lightning_cxl.machine.topology import ssd_capacity_bytes


@pytest.fixture
def drives(monkeypatch, tmp_path):
    """Makes folders, and says what is free on which drive: ``drives(a=(drive, free), ...)``."""

    def make(**given):
        real = os.stat
        for name in given:
            (tmp_path / name).mkdir()
        by_path = {str(tmp_path / name): value for name, value in given.items()}
        monkeypatch.setattr(
            os, "statvfs", lambda path: SimpleNamespace(f_bavail=by_path[str(path)][1] // 4096, f_frsize=4096)
        )

        def stat(path, **kwargs):
            found = by_path.get(str(path))
            return real(path, **kwargs) if found is None or kwargs else SimpleNamespace(st_dev=found[0])

        monkeypatch.setattr("lightning_cxl.machine.topology.os.stat", stat)
        monkeypatch.setattr(disk_space, "filesystem_of", lambda folder: "")
        return [tmp_path / name for name in given]

    return make


def test_a_budget_is_the_capacity_whatever_is_free(tmp_path):
    assert ssd_capacity_bytes(SsdOptions((tmp_path,), 1 << 50)) == 1 << 50


def test_without_a_budget_it_is_what_is_free_less_two_percent(drives):
    (folder,) = drives(a=(1, 4096 * 1000))
    assert ssd_capacity_bytes(SsdOptions((folder,))) == 4096 * 980


def test_of_several_drives_the_one_with_least_free_space_decides(drives):
    folders = drives(a=(1, 4096 * 1000), b=(2, 4096 * 100), c=(3, 4096 * 5000))
    assert ssd_capacity_bytes(SsdOptions(tuple(folders))) == 4096 * 294


def test_folders_on_one_drive_share_what_is_free_there(drives):
    folders = drives(a=(1, 4096 * 1000), b=(1, 4096 * 1000))
    assert ssd_capacity_bytes(SsdOptions(tuple(folders))) == 4096 * 980


def test_a_folder_that_is_not_there_yet_counts_as_the_one_around_it(drives):
    (folder,) = drives(a=(1, 4096 * 1000))
    assert ssd_capacity_bytes(SsdOptions((folder / "run" / "state",))) == 4096 * 980


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r'the path .*file/run of "ssd" is no folder: .*file is something else'):
        ssd_capacity_bytes(SsdOptions((tmp_path / "file" / "run",)))


def test_a_folder_in_memory_is_refused_and_one_on_a_network_is_warned_of(tmp_path, monkeypatch, caplog):
    options = SsdOptions((tmp_path / "new",), 1 << 30)
    for kind in ("tmpfs", "ramfs"):
        monkeypatch.setattr(disk_space, "filesystem_of", lambda folder, kind=kind: kind)
        with pytest.raises(ConfigError, match=f"lies in memory.*is on {kind}.*Give a folder on a drive"):
            ssd_capacity_bytes(options)
    for kind, is_said in (("ext4", False), ("", False), ("nfs4", True), ("fuse.sshfs", True), ("fuseblk", False)):
        caplog.clear()
        monkeypatch.setattr(disk_space, "filesystem_of", lambda folder, kind=kind: kind)
        assert ssd_capacity_bytes(options) == 1 << 30
        assert (f"is on {kind}:" in caplog.text) is is_said


@pytest.mark.parametrize("place", ["disk", "partition", "slave", "slave of a slave"])
def test_a_disk_that_says_that_it_rotates_is_warned_of(tmp_path, monkeypatch, caplog, place):
    folder, options = tmp_path, SsdOptions((tmp_path,), 1 << 30)
    blocks, disk = tmp_path / "dev/block", tmp_path / "devices/block/sda"
    (disk / "device").mkdir(parents=True)
    block = {"disk": disk, "partition": disk / "sda1", "slave": tmp_path / "devices/block/dm-0"}[place.split(" ")[0]]
    (block / "slaves").mkdir(parents=True)
    if place == "slave":
        (disk / "sda1").mkdir()
        (block / "slaves/sda1").symlink_to(disk / "sda1")
    if place == "slave of a slave":
        (disk / "sda1").mkdir()
        below = tmp_path / "devices/block/dm-1"
        (below / "slaves").mkdir(parents=True)
        (below / "slaves/sda1").symlink_to(disk / "sda1")
        (block / "slaves/dm-1").symlink_to(below)
    blocks.mkdir(parents=True)
    drive = disk_space.drive_of(folder)
    (blocks / f"{os.major(drive)}:{os.minor(drive)}").symlink_to(block)
    monkeypatch.setattr(disk_space, "_BLOCKS", blocks)
    for page, is_said in ((None, False), ("00b1003c0001", False), ("00b1003c0000", False), ("00b1003c1c20", True)):
        if page is not None:
            (disk / "device/vpd_pgb1").write_bytes(bytes.fromhex(page))
        caplog.clear()
        assert ssd_capacity_bytes(options) == 1 << 30
        assert ("rotates (7200 rpm)" in caplog.text) is is_said
