"""Checkpoint files that cost no second copy of the model in memory."""

import contextlib
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lightning_cxl.errors import CheckpointError
from lightning_cxl.memory.resource import pages_of_file
from lightning_cxl.run.checkpoint_folder import META, take_place
from lightning_cxl.run.partial_file import open_partial, remove_left
from lightning_cxl.storage.system import sync_folder
from lightning_cxl.torch_private import mapping_files_with

_STEP_BYTES = 4 * 2**20


def save_file(checkpoint: Mapping[str, Any], target: Path) -> None:
    """Write `checkpoint` straight to a local file, which appears under its name only when it is complete.

    What runs that were killed while they saved have left in its folder is removed.

    Raises:
        CheckpointError: the file system refused; nothing is left behind.
    """
    made = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
    partial = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_left(target.parent)
        file, partial = open_partial(target)
        with file:
            _torch_save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # it would fill the node that tiers are on
            _take_place(partial, target)  # while it is locked
        for folder in (target.parent, *(each.parent for each in made)):  # names, too: older state is let go of next
            sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"could not write checkpoint `{target}`: {error.strerror or error}. Free space there or save elsewhere."
        ) from error
    finally:
        if partial is not None:
            with contextlib.suppress(OSError):  # users need the first error; the next save here removes the file
                partial.unlink(missing_ok=True)


def _torch_save(checkpoint: Mapping[str, Any], file: BinaryIO) -> None:
    """Call ``torch.save``, and raise what the file has raised: torch then ends the file, with an error of its own."""
    try:
        torch.save(checkpoint, file)
        return
    except RuntimeError as error:
        first = error.__context__
        if not isinstance(first, (OSError, KeyboardInterrupt)):
            raise
    raise first.with_traceback(None)  # frames of torch would keep memory alive, as would its error as the context


def _take_place(partial: Path, target: Path) -> None:
    """Give a finished file its name, which the checkpoint of several processes, a folder, may have."""
    if (target / META).is_file():
        take_place(partial, target)
    else:
        os.replace(partial, target)


def load_file(path: Path, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a local checkpoint through a private memory map: its pages count as file cache, not as a second copy.

    It may be larger than memory, as that of state on SSD is. It is read once before, to compare its checksums.

    Raises:
        CheckpointError: the file is damaged or not a checkpoint, cannot be mapped, or has types that torch does not
            know to be harmless.
        FileNotFoundError: there is no such file.
    """
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    mmap = zipfile.is_zipfile(path)  # files of torch before 1.6 are not
    try:
        if mmap:
            _check(path)
        with mapping_files_with(_pages):
            loaded = torch.load(path, map_location=map_location, mmap=mmap, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if mmap and "weights_only" in str(error).lower():
            raise needs_code(path, error) from error  # a sound file with other types in it
        raise _damaged(path, error) from error
    except CheckpointError:
        raise
    except (EOFError, RuntimeError, KeyError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from error
    if not isinstance(loaded, dict):
        raise _damaged(path, TypeError(f"it holds a {type(loaded).__name__}, not a dict"))
    return loaded


def needs_code(path: Path, error: Exception) -> CheckpointError:
    """Return what to say in the place of torch's error, which advises to run whatever code a file asks for."""
    lines = [line.strip() for line in str(error).splitlines()]
    asked = next((line for line in lines if "GLOBAL" in line or "WeightsUnpickler" in line), type(error).__name__)
    return CheckpointError(
        f"checkpoint `{path}` was not read: {asked.partition(' Please use')[0]} Reading it could run code. If you "
        "trust whoever has written it, name the class of that value in `torch.serialization.add_safe_globals([...])`"
    )


def _check(path: Path) -> None:
    """Compare the checksums of a file, which torch does not; it writes 0 where it shall compute none.

    Raises:
        CheckpointError: a part has other bytes than were written, or cannot be read.
        zipfile.BadZipFile: as above.
    """
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if not entry.CRC:
                continue
            try:
                with archive.open(entry) as part:
                    while part.read(_STEP_BYTES):
                        pass
            except OSError as error:
                raise CheckpointError(f"cannot read checkpoint `{path}`: {error.strerror or error}") from error


def _pages(path: str, nbytes: int) -> torch.UntypedStorage:
    try:
        with open(path, "rb") as file:
            return pages_of_file(file.fileno(), nbytes).tensor((nbytes,), torch.uint8).untyped_storage()
    except OSError as error:
        raise CheckpointError(f"cannot map checkpoint `{path}`: {error.strerror or error}") from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    text = str(error).strip().splitlines()
    return CheckpointError(
        f"cannot read checkpoint `{path}`: {type(error).__name__}: {text[0] if text else 'file ends early'}. "
        "The file is damaged or not a checkpoint: resume from another one."
    )
