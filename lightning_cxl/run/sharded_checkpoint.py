"""Checkpoints that several processes write together, and that any number of processes reads.

[Note: Sharded checkpoints]
A folder in the format of ``torch.distributed.checkpoint``, with names as Lightning's ``ModelParallelStrategy`` gives
them, so that it reads what we write::

    state_dict.NAME                         weights
    optimizer_0.state.NAME.exp_avg          optimizer state, by the parameter's name; of other optimizers alike
    optimizer_0.param_groups.0.lr           hyper-parameters
    lightning_cxl.master_weights.NAME       master weights that are not the model's weights themselves
    meta.pt                                 all that is no tensor: what Lightning keeps in a checkpoint, and our entry

Each process writes its own shards and reads what lies where its shards are now, straight into the memory that they have
already (`run/sharded_reading.py`). So nothing is gathered, and nothing has to be converted when the number of processes
changes, also from and to one. Scales of 8-bit state are per block of a shard: they are saved beside the number of the
shard's first element (``absmax1.4096``), and codes of other shards are decoded (`optim/resharded.py`).

The folder has a name of its own until everything is on the drive (`save`), and gets one before it is removed
(`remove`). So a process that dies leaves the last checkpoint whole. What it was writing is removed by the next save in
this place: nobody has a lock on it any more.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as save_together
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError
from lightning_cxl.optim.parameter_state import MOMENT_KEYS
from lightning_cxl.shards import first_element, is_sharded
from lightning_cxl.storage.system import exchange, sync_folder

log = logging.getLogger(__name__)

META = "meta.pt"
TIED = "tied_weights"
"""In our entry: lists of names that are one parameter. Files have these as one tensor, folders as several."""
_IS_OURS = re.compile(r"meta\.pt|\.metadata(\.tmp)?|__\d+_\d+\.distcp").fullmatch
"""Whether a name is of a file in a checkpoint."""
SCALES = tuple(keys.scales for keys in MOMENT_KEYS)
"""Keys of state that is per block of a shard."""


def is_sharded_checkpoint(path: Path) -> bool:
    """Return whether a path is a folder that `save` has written, or Lightning's ``ModelParallelStrategy``."""
    return path.is_dir() and (path / META).is_file()


def save(path: Path, tensors: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Write a checkpoint, on all processes together; it appears under its name only when it is complete.

    Args:
        path: the same on all processes, which see the same files there.
        tensors: nested; what is not cut is the same on all processes.
        rest: no tensors; of the first process.

    Raises:
        CheckpointError: a process could not write its part, or is gone. What was there under the name still is.
    """
    partial = _partial(path)
    with ExitStack() as cleanup:
        _on_first(path, lambda: cleanup.enter_context(_new_folder(partial)))
        try:
            save_together(dict(tensors), checkpoint_id=partial)
        except (Exception, CheckpointException) as error:  # the second is no Exception
            raise _not_written(path, error) from error
        _on_first(path, lambda: _complete(path, partial, rest))


def remove(path: Path) -> None:
    """Remove a checkpoint, on one process: at once for those who look for it, so that nobody finds a part of it.

    Raises:
        OSError: it is still there, or what is left of it could not be removed.
    """
    partial = _partial(path)
    _remove(partial)
    os.rename(path, partial)
    _remove(partial)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


@contextmanager
def _new_folder(partial: Path) -> Iterator[None]:
    """Make a folder that is being written, and lock it as long; remove those of runs that were killed."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    for left in partial.parent.glob(".*.partial"):
        if left.is_dir() and all(_IS_OURS(each.name) for each in left.iterdir()):
            with contextlib.suppress(OSError), _locked(left):
                _remove(left)
    _remove(partial)  # it is ours in any case, whether or not there are locks here
    partial.mkdir()
    with ExitStack() as cleanup:
        with contextlib.suppress(OSError):  # no locks here
            cleanup.enter_context(_locked(partial))
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; the kernel lets go of the lock when the process is killed.

    Raises:
        OSError: another process has locked it, or there are no locks here.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _complete(path: Path, partial: Path, rest: Mapping[str, Any]) -> None:
    with open(partial / META, "wb") as file:
        torch.save(dict(rest), file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    if os.path.lexists(path):  # also a link that leads nowhere
        exchange(partial, path)
        sync_folder(path.parent)
        _remove(partial)
    else:
        os.rename(partial, path)
        sync_folder(path.parent)


def _on_first(path: Path, act: Callable[[], None]) -> None:
    """Let the first process act, and all others learn whether it could.

    Raises:
        CheckpointError: it could not.
    """
    problem: list[str | None] = [None]  # as text: not every error can be sent
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            act()
        except Exception as error:
            problem[0] = str(error) or type(error).__name__
            log.info("a checkpoint could not be written", exc_info=error)
    if dist.is_initialized():
        dist.broadcast_object_list(problem)
    if problem[0] is not None:
        raise _not_written(path, RuntimeError(problem[0]))


def first_failure(error: BaseException) -> BaseException:
    """Return the error of one process where torch has collected those of all."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _not_written(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"could not write checkpoint `{path}`: {first_failure(error)}. The checkpoint before is as it was. Free space "
        "there, or save elsewhere; the folder must be one that all processes see"
    )


# -- optimizer state by name -----------------------------------------------------------------------------------------


def optimizer_tensors(optimizer: Optimizer, name_of: Callable[[torch.Tensor], str]) -> dict[str, Any]:
    """Return the state of an optimizer by names of parameters, as FSDP2's own tools do; tensors are not copied."""
    states, groups = {}, []
    for group in optimizer.param_groups:
        names = [name_of(parameter) for parameter in group["params"]]
        for name, parameter in zip(names, group["params"], strict=True):
            entry = optimizer.state.get(parameter)
            if entry:
                states[name] = _saved_entry(entry, parameter)
        groups.append({**{key: value for key, value in group.items() if key != "param_names"}, "params": names})
    return {"state": states, "param_groups": groups}


def _saved_entry(entry: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return state with a name of its own for what belongs to one shard."""
    if not is_sharded(parameter):
        return dict(entry)
    mark = f".{first_element(parameter)}"
    return {key + mark if key in SCALES else key: value for key, value in entry.items()}
