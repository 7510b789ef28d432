"""How much the tier `ssd` may hold: its budget, or what is free on its drives."""

import os
from collections import Counter
from pathlib import Path

from lightning_cxl.errors import ConfigError
from lightning_cxl.ssd_options import SsdOptions

_USED = 0.98  # of what is free: a file system needs some for itself, and slows down when it is full


def ssd_capacity_bytes(options: SsdOptions) -> int:
    """Return the bytes that the tier may take on all drives together.

    Records are cut evenly over the drives, so without a budget the drive with least free space decides. Folders on one
    file system share what is free there. A folder that does not exist yet counts as the nearest one around it.

    Raises:
        ConfigError: a path is no folder.
    """
    folders = [existing_folder(path) for path in options.paths]
    if options.budget_bytes is not None:
        return options.budget_bytes
    drives = Counter(map(drive_of, folders))
    least = min(_free_bytes(folder) // drives[drive_of(folder)] for folder in folders)
    return int(least * len(folders) * _USED)


def drive_bytes(options: SsdOptions) -> int:
    """Return the size of the drives together, as their file systems say it."""
    found = {drive_of(folder): os.statvfs(folder) for folder in map(existing_folder, options.paths)}
    return sum(each.f_blocks * each.f_frsize for each in found.values())


def drive_of(folder: Path) -> int:
    """Return what tells drives apart: the device of the file system."""
    return os.stat(folder).st_dev


def existing_folder(path: Path) -> Path:
    """Return a folder, or where it does not exist yet, the nearest one around it.

    Raises:
        ConfigError: there is something else at the path.
    """
    for folder in (path, *path.parents):
        if folder.exists():
            if folder.is_dir():
                return folder
            break
    raise ConfigError(f'tiers: the path {path} of "ssd" is no folder: {folder} is something else')


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
