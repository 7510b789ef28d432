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

The folder has its name only when everything is on the drive: [Note: Unfinished folders].
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError
from lightning_cxl.optim.parameter_state import MOMENT_KEYS
from lightning_cxl.optim.state_visits import read_states
from lightning_cxl.run.checkpoint_file import META, lying_at, put_in_place, unfinished
from lightning_cxl.sharding.agreement import on_all_ranks
from lightning_cxl.shards import first_element, is_sharded

TIED = "tied_weights"
"""In our entry: lists of names that are one parameter. Files have these as one tensor, folders as several."""
SCALES = tuple(keys.scales for keys in MOMENT_KEYS)
"""Keys of state that is per block of a shard."""


def is_sharded_checkpoint(path: Path) -> bool:
    """Return whether a path is a folder that `save` has written, or Lightning's ``ModelParallelStrategy``."""
    return (lying_at(path) / META).is_file()


def save(path: Path, tensors: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Write a checkpoint, on all processes together; it appears under its name only when it is complete.

    Args:
        path: the same on all processes, which see the same files there.
        tensors: nested; what is not cut is the same on all processes.
        rest: no tensors; of the first process.

    Raises:
        CheckpointError: a process could not write its part, or is gone. What was there under the name still is.
    """
    write(path, tensors, lambda file: torch.save(dict(rest), file))


def write(path: Path, tensors: Mapping[str, Any], write_rest: Callable[[BinaryIO], Any], group: Any = None) -> None:
    """Do what `save` does.

    Args:
        path: see `save`.
        tensors: see `save`.
        write_rest: writes what is no tensor to a file; called on the first process.
        group: through which the processes agree: all of them, with gloo. None is the default one.
    """
    # torch's module takes as long to import as a quarter of this package, and one device needs none of it
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as save_together

    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with ExitStack() as cleanup:

        def begin() -> Path | None:
            return cleanup.enter_context(unfinished(path)) if is_first else None

        def finish() -> None:
            if is_first and folder is not None:
                with open(folder / META, "wb") as file:
                    write_rest(file)
                    file.flush()
                    os.fsync(file.fileno())
                put_in_place(folder, path)

        try:
            folder = on_all_ranks(begin, group)[0]
            save_together(dict(tensors), checkpoint_id=folder, process_group=group)
            on_all_ranks(finish, group)
        except (Exception, CheckpointException) as error:  # the second is no Exception
            raise _not_written(path, error) from error


def first_failure(error: BaseException) -> BaseException:
    """Return the error of one process where torch has collected those of all."""
    from torch.distributed.checkpoint.api import CheckpointException

    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _not_written(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"could not write checkpoint `{path}`: {first_failure(error)}. The checkpoint before is as it was. Free space "
        "there, or save elsewhere; the folder must be one that all processes see"
    )


# -- optimizer state by name -----------------------------------------------------------------------------------------


def optimizer_tensors(optimizer: Optimizer, name_of: Callable[[torch.Tensor], str]) -> dict[str, Any]:
    """Return the state of an optimizer by names of parameters, as FSDP2's own tools do; tensors are not copied."""
    known = read_states(optimizer.state, compares_checksums=False)  # `check_together` does, on all processes
    states, groups = {}, []
    for group in optimizer.param_groups:
        names = [name_of(parameter) for parameter in group["params"]]
        for name, parameter in zip(names, group["params"], strict=True):
            entry = known.get(parameter)
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
