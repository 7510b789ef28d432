"""Folders of several processes that store on the same drives: each has one for itself, below the one that a user names.

A process removes what an earlier one has left in its own folder. But the next run may have fewer processes, or one.
"""

import contextlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from lightning_cxl.errors import ConfigError, StorageError
from lightning_cxl.storage.folder import MANIFEST, PART, Folder
from lightning_cxl.storage.system import System

log = logging.getLogger(__name__)

_NAME = re.compile(r"rank-\d+")


def make_parents(paths: Sequence[Path]) -> None:
    """Make what the folders of a process lie in, where it does not exist; what that lies in must exist.

    Raises:
        StorageError: it cannot be made.
    """
    for path in paths:
        try:
            with contextlib.suppress(FileExistsError):
                System().make_folder(path.parent)
        except OSError as error:
            raise StorageError(f"cannot make folder `{path.parent}`: {error.strerror}", path.parent) from None


def remove_left(paths: Sequence[Path]) -> None:
    """Remove the data of processes that have ended from all their folders; what a process uses stays.

    Args:
        paths: the folders that a user has named, one for each drive; they need not exist.
    """
    for path in paths:
        for name in System().names(path) if path.is_dir() else ():
            if _NAME.fullmatch(name) and (path / name).is_dir():
                _remove_left(path / name)


def _remove_left(path: Path) -> None:
    try:
        folder = Folder(path, System())
    except ConfigError:  # its process is still there
        return
    except StorageError as error:
        log.warning(f"what an earlier run may have left in `{path}` stays: {error}")
        return
    try:
        if folder.read(MANIFEST) is None and folder.read(PART) is None:  # else someone keeps a generation there
            folder.remove_orphans(keep=None)
    except StorageError as error:
        log.warning(f"what an earlier run has left in `{path}` stays: {error}")
    finally:
        folder.close()
