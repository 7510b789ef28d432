"""Files that a command writes: checked before an hour is spent on measuring, and written with errors of ours."""

import sys
from pathlib import Path

from lightning_cxl.errors import ConfigError

TO_STDOUT = Path("-")
"""Stands for stdout in the place of a file."""


def check_target(path: Path | None) -> None:
    """Check that a file can be written, as far as that can be known before; None is no file, and so is `TO_STDOUT`.

    Raises:
        ConfigError: its folder does not exist, or it is a folder.
    """
    if path is None or path == TO_STDOUT:
        return
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: its folder does not exist")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder. Name a file in it")


def write_text(path: Path, text: str) -> None:
    """Write a file, or to stdout.

    Raises:
        ConfigError: it cannot be written.
    """
    if path == TO_STDOUT:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Name a file that can be written") from error
