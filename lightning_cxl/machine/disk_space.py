"""How much the tier `ssd` may hold: its budget, or what is free on its drives."""

import contextlib
import logging
import os
from collections import Counter
from pathlib import Path

from lightning_cxl.errors import ConfigError
from lightning_cxl.ssd_options import SsdOptions

log = logging.getLogger(__name__)

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_ON_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse")
_BLOCKS = Path("/sys/dev/block")
_USED = 0.98  # of what is free: a file system needs some for itself, and slows down when it is full


def ssd_capacity_bytes(options: SsdOptions) -> int:
    """Return the bytes that the tier may take on all drives together.

    Records are cut evenly over the drives, so without a budget the drive with least free space decides. Folders on one
    file system share what is free there. A folder that does not exist yet counts as the nearest one around it.
    """
    folders = [existing_folder(path) for path in options.paths]
    for folder in folders:
        _check_kind(folder)
    if options.budget_bytes is not None:
        return options.budget_bytes
    drives = Counter(map(drive_of, folders))
    least = min(_free_bytes(folder) // drives[drive_of(folder)] for folder in folders)
    return int(least * len(folders) * _USED)


def drive_of(folder: Path) -> int:
    """Return what tells drives apart: the device of the file system."""
    return os.stat(folder).st_dev


def existing_folder(path: Path) -> Path:
    """Return a folder, or where it does not exist yet, the nearest one around it."""
    for folder in (path, *path.parents):
        if folder.exists():
            if folder.is_dir():
                return folder
            break
    raise ConfigError(f'tiers: the path {path} of "ssd" is no folder: {folder} is something else')


def filesystem_of(folder: Path) -> str:
    """Return the type of the filesystem that a folder lies on, such as ``"ext4"``; empty where it is not known."""
    number = _number(drive_of(folder))
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        of_mount, _, of_filesystem = line.partition(" - ")
        if of_mount.split()[2] == number:
            return of_filesystem.split()[0]
    return ""


def _check_kind(folder: Path) -> None:
    kind = filesystem_of(folder)
    if kind in _IN_MEMORY:
        raise ConfigError(
            f'tiers: the path of "ssd" lies in memory: `{folder}` is on {kind}. Give a folder on a drive; `df -T` says '
            f"what folders are on"
        )
    if kind.partition(".")[0] in _ON_NETWORK:
        log.warning(f"tier ssd: `{folder}` is on {kind}: all state goes through it in every step; use a local drive")
    if speed := _rotations_per_minute(folder):
        log.warning(f"tier ssd: `{folder}` is on a disk that rotates ({speed} rpm): every step waits for it")


def _rotations_per_minute(folder: Path) -> int:
    """Return how fast a disk says that it rotates; 0 where it does not: for Linux virtual ones rotate, too."""
    block = (_BLOCKS / _number(drive_of(folder))).resolve()
    slaves = (*block.glob("slaves/*"), *block.glob("slaves/*/slaves/*"))  # of LVM, RAID and encryption
    below = [each.resolve() for each in slaves]
    speeds = [0]
    for disk in (disk for each in (block, *below) for disk in (each, each.parent)):  # of a partition
        with contextlib.suppress(OSError):
            speeds.append(int.from_bytes((disk / "device/vpd_pgb1").read_bytes()[4:6]))
    return max(speed for speed in speeds if speed == 0 or 0x400 < speed < 0xFFFF)


def _number(drive: int) -> str:
    return f"{os.major(drive)}:{os.minor(drive)}"


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
