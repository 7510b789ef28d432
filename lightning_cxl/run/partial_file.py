"""Checkpoint files that are being written: they have a name of their own until they are complete, and a lock."""

import fcntl
import logging
import os
import re
import secrets
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

_LOCKED = re.compile(r"\..+\.[0-9a-f]{8}\.checkpoint\.partial")
_MOST_CHARS = 48  # of the target's name: a character has up to 4 bytes, and filesystems take names of 255


def open_partial(target: Path) -> tuple[BinaryIO, Path]:
    """Open a new file beside `target`, and return it with its path.

    It is locked while it is open. The kernel lets go of the lock when the process is killed, so `remove_left` knows
    which files nobody writes any more, whatever process, container or machine they are from.

    Raises:
        OSError: it cannot be made.
    """
    name = target.name[:_MOST_CHARS]
    while True:
        token = secrets.token_hex(4)
        path = target.with_name(f".{name}.{token}.checkpoint.partial")
        file = open(path, "x+b")  # noqa: SIM115 - it is returned
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody is about to remove it
            file.close()
            continue
        except OSError:  # no locks here: a name that nobody removes
            return file, path.rename(target.with_name(f".{name}.{token}.partial"))
        if os.fstat(file.fileno()).st_nlink:
            return file, path
        file.close()  # removed before it was locked


def remove_left(folder: Path) -> None:
    """Remove the unfinished files in a folder that nobody writes any more. What cannot be removed stays."""
    for path in folder.glob(".*.checkpoint.partial"):
        if not _LOCKED.fullmatch(path.name):
            continue
        try:
            with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b") as file:
                nbytes = os.fstat(file.fileno()).st_size
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except OSError:  # somebody writes it or has just finished it, or it is not ours to remove
            continue
        log.info(f"removed `{path}`, {nbytes} bytes of a checkpoint that a killed run has left unfinished")
