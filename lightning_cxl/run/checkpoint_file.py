"""Checkpoint files that cost no second copy of the model in memory."""

import contextlib
import fcntl
import logging
import os
import pickle
import re
import secrets
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lightning_cxl.errors import CheckpointError
from lightning_cxl.memory.resource import pages_of_file
from lightning_cxl.storage.drive import exchange, sync_folder
from lightning_cxl.torch_private import mapping_files_with

# ----------------------------------------------------------------------------------------------------
# Checkpoint files that are being written: they have a name of their own until they are complete, and a lock.

log = logging.getLogger(__name__)

_LOCKED = re.compile(r"\..+\.[0-9a-f]{8}\.checkpoint\.partial")
_MOST_CHARS = 48  # of the target's name: a character has up to 4 bytes, and filesystems take names of 255


def open_partial(target: Path) -> tuple[BinaryIO, Path]:
    """Open a new file beside `target`, and return it with its path.

    It is locked while it is open. The kernel lets go of the lock when the process is killed, so `remove_left` knows
    which files nobody writes any more, whatever process, container or machine they are from.
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


# ----------------------------------------------------------------------------------------------------
# The folder of a checkpoint: unfinished under a name of its own, then at once under its name. Used by one process.
#
# [Note: Unfinished folders]
# A folder is written as ``.NAME.TOKEN.partial`` (`unfinished`), and takes its name when it is complete
# (`put_in_place`). It gets a name like that again before it is removed (`remove`). So who dies leaves the last
# checkpoint whole.
#
# What the dead have left is removed by the next `unfinished` in that place. It knows by a lock: who writes a folder has
# locked it, and the kernel lets go of the lock when the process is killed. A folder is there before it can be locked.
# Who has lost its new folder to somebody else in between takes another one: it finds the lock taken, or the name gone.
#
# Some filesystems have no locks. Tokens would hide what the dead have left there: a folder is ``.NAME.partial`` then,
# and the next one of the same name replaces it.
#
# Some, such as NFS, cannot let two names change places. There what had the name is ``NAME.being_replaced.ckpt`` for a
# moment, and a crash in this moment leaves it so. `lying_at` finds it; so does Lightning where it looks for "last".

META = "meta.pt"
"""The file with what is no tensor. It is the last one that is written."""
_IS_OURS = re.compile(r"meta\.pt|\.metadata(\.tmp)?|__\d+_\d+\.distcp").fullmatch
"""Whether a name is of a file in a checkpoint."""
_REPLACED = ".being_replaced"


def lying_at(path: Path) -> Path:
    """Return where the checkpoint of a name lies: there, or where a crash has left it while it was replaced."""
    if not path.name:  # of no checkpoint: it is `.` or `/`
        return path
    before = _before(path)
    return before if not os.path.lexists(path) and os.path.lexists(before) else path


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """Make and lock a new folder beside `target`, and remove those that killed processes left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(target.parent)
    with ExitStack() as cleanup:
        while True:
            path = target.with_name(f".{target.name[:_MOST_CHARS]}.{secrets.token_hex(4)}.partial")
            path.mkdir()
            try:
                cleanup.enter_context(_locked(path))
            except (BlockingIOError, FileNotFoundError):  # somebody takes it for left behind
                continue
            except OSError:  # no locks here
                path = path.rename(_cleared(target.with_name(f".{target.name}.partial")))
            break
        yield path


def put_in_place(folder: Path, path: Path) -> None:
    """Give a finished folder its name; see `take_place`."""
    sync_folder(folder)
    take_place(folder, path)


def take_place(finished: Path, path: Path) -> None:
    """Rename a finished file or folder to `path`, also where a folder is. What was there is removed."""
    replaced = _before(path)
    if os.path.lexists(path):  # also a link that leads nowhere
        if exchange(finished, path):
            replaced = finished
        else:
            os.rename(path, _cleared(replaced))
    if replaced != finished:
        os.rename(finished, path)
    sync_folder(path.parent)
    try:
        _remove(replaced)
    except OSError as error:  # the new one is in place: no reason to call it not written
        log.warning(f"`{replaced}`, which checkpoint `{path}` has replaced, could not be removed: {error}")


def remove(path: Path) -> None:
    """Remove a checkpoint: at once for those who look for it, so that nobody finds a part of it."""
    path = lying_at(path)
    with ExitStack() as cleanup:
        gone = path.with_name(f".{path.name[:_MOST_CHARS]}.{secrets.token_hex(4)}.partial")
        try:
            cleanup.enter_context(_locked(path))
        except OSError:  # no locks here
            gone = _cleared(path.with_name(f".{path.name}.partial"))
        _remove(path.rename(gone))


def _before(path: Path) -> Path:
    return path.with_name(f"{path.stem}{_REPLACED}{path.suffix}")


def _remove_left(folder: Path) -> None:
    """Remove what nobody writes any more; what cannot be removed, and folders with files of others, stay."""
    for left in folder.glob(".*.partial"):
        with contextlib.suppress(OSError), _locked(left):
            if all(_IS_OURS(name) for name in os.listdir(left)):
                shutil.rmtree(left)
    for left in folder.glob(f"*{_REPLACED}*"):
        with contextlib.suppress(OSError, ValueError):  # one that has no other name is not ours
            path = left.with_name(left.name.replace(_REPLACED, ""))
            if path.is_dir() and left.is_dir() and all(_IS_OURS(name) for name in os.listdir(left)):
                _remove(left)  # the crash came after the other one had the name


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; the kernel lets go of the lock when the process is killed."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(folder)):
            raise FileNotFoundError(f"{folder} is another folder now")
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # also where a forked child still has the folder open
    finally:
        os.close(fd)


def _cleared(path: Path) -> Path:
    _remove(path)
    return path


def _remove(path: Path) -> None:
    """Remove what is there, if anything is; somebody else may be removing it, too."""
    with contextlib.suppress(FileNotFoundError):
        if not os.path.islink(path) and os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()


_STEP_BYTES = 4 * 2**20


def save_file(checkpoint: Mapping[str, Any], target: Path) -> None:
    """Write `checkpoint` straight to a local file, which appears under its name only when it is complete.

    What runs that were killed while they saved have left in its folder is removed.
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
    """Compare the checksums of a file, which torch does not; it writes 0 where it shall compute none."""
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
