"""The folder of a checkpoint: unfinished under a name of its own, then at once under its name. Used by one process.

[Note: Unfinished folders]
A folder is written as ``.NAME.TOKEN.partial`` (`unfinished`), and takes its name when it is complete (`put_in_place`).
It gets a name like that again before it is removed (`remove`). So who dies leaves the last checkpoint whole.

What the dead have left is removed by the next `unfinished` in that place. It knows by a lock: who writes a folder has
locked it, and the kernel lets go of the lock when the process is killed. A folder is there before it can be locked. Who
has lost its new folder to somebody else in between takes another one: it finds the lock taken, or the name gone.

Some filesystems have no locks. Tokens would hide what the dead have left there: a folder is ``.NAME.partial`` then, and
the next one of the same name replaces it.

Some, such as NFS, cannot let two names change places. There what had the name is ``NAME.being_replaced.ckpt`` for a
moment, and a crash in this moment leaves it so. `lying_at` finds it; so does Lightning where it looks for "last".
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightning_cxl.storage.system import exchange, sync_folder

log = logging.getLogger(__name__)

META = "meta.pt"
"""The file with what is no tensor. It is the last one that is written."""
_IS_OURS = re.compile(r"meta\.pt|\.metadata(\.tmp)?|__\d+_\d+\.distcp").fullmatch
"""Whether a name is of a file in a checkpoint."""
_MOST_CHARS = 48  # of the name: a character has up to 4 bytes, and filesystems take names of 255
_REPLACED = ".being_replaced"


def lying_at(path: Path) -> Path:
    """Return where the checkpoint of a name lies: there, or where a crash has left it while it was replaced."""
    if not path.name:  # of no checkpoint: it is `.` or `/`
        return path
    before = _before(path)
    return before if not os.path.lexists(path) and os.path.lexists(before) else path


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """Return a region in which a new folder beside `target` is locked; yields the folder. Removes what the dead left.

    Raises:
        OSError: it cannot be made.
    """
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
    """Give a finished file or folder its name, also where a folder has it. What had it is removed, as far as it can be.

    Raises:
        OSError: it could not be renamed.
    """
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
    """Remove a checkpoint: at once for those who look for it, so that nobody finds a part of it.

    Raises:
        OSError: it is still there, or what is left of it could not be removed.
    """
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
    """Lock a folder; the kernel lets go of the lock when the process is killed.

    Raises:
        FileNotFoundError: it is not there, or not any more.
        BlockingIOError: somebody else has locked it.
        OSError: there are no locks here.
    """
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
