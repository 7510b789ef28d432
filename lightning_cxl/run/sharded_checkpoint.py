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
shard's first element (``absmax1.4096``), and codes of other shards are decoded (`optim/parameter_state.py`).

The folder has its name only when everything is on the drive: [Note: Unfinished folders].
"""

import copy
import io
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError
from lightning_cxl.memory.hook import ordinary_memory
from lightning_cxl.optim.parameter_state import MOMENT_KEYS
from lightning_cxl.optim.swapped_state import read_states
from lightning_cxl.run.checkpoint import META, lying_at, put_in_place, unfinished
from lightning_cxl.run.state_on_ssd import KEY
from lightning_cxl.sharding.processes import on_all_ranks
from lightning_cxl.shards import first_element, is_sharded, local, sharded_like
from lightning_cxl.torch_private import tree_leaves

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
    """
    write(path, tensors, lambda file: torch.save(dict(rest), file))


def write(path: Path, tensors: Mapping[str, Any], write_rest: Callable[[BinaryIO], Any], group: Any = None) -> None:
    """Do what `save` does."""
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


def tensors_of_folder(
    weights: Mapping[str, Any] | None, states: Sequence[Mapping[str, Any]], own: dict[str, Any]
) -> dict[str, Any]:
    """Return what `save` gets, with the master weights that our entry has; they are taken out of it. `own`: INOUT."""
    tensors: dict[str, Any] = {f"optimizer_{index}": each for index, each in enumerate(states)}
    if weights is not None:
        tensors["state_dict"] = weights
    if masters := own.pop("master_weights", None):
        tensors[KEY] = {"master_weights": masters}
    return tensors


def _saved_entry(entry: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return state with a name of its own for what belongs to one shard."""
    if not is_sharded(parameter):
        return dict(entry)
    mark = f".{first_element(parameter)}"
    return {key + mark if key in SCALES else key: value for key, value in entry.items()}


# ----------------------------------------------------------------------------------------------------
# `AsyncSaves`: several processes write a checkpoint together while they train on.
#
# [Note: Saves behind the training]
# `save` copies what this process has of the checkpoint to host memory, and returns; a thread writes the copy, as [Note:
# Sharded checkpoints] says. Values other than tensors are pickled at once. So a checkpoint has the values of the moment
# of the call, whatever is updated after it.
#
# * The threads of all processes agree in a process group of their own. A group serves one collective after the other,
#   in the same order everywhere, and nobody knows when a thread comes to its next one. So none of the training's is
#   used. A main thread uses theirs where nothing is being written.
# * One checkpoint is written at a time, and there is one copy: the next `save` waits.
# * An error of one process is one of all, as in every save. All raise it when they wait: at the next `save` or `wait`,
#   or at the end (`close`). A step after it (`then`) is of one process alone, and so is its error.
# * Who removes an older checkpoint right after a save does so when the new one has its name (`then`), and not at all
#   where that has failed. So a run that is killed at any moment leaves a whole checkpoint.


class AsyncSaves:
    """Writes checkpoints of all processes in a thread. See [Note: Saves behind the training].

    All processes make it, and call `save`, `wait` and `close`, in the same order.

    Args:
        timeout: for which a process waits for the others while they write; None is torch's own.
        prepare: the thread calls it first: torch's current device is of a thread, and a new one has the first.
    """

    def __init__(self, timeout: timedelta | None = None, prepare: Callable[[], None] | None = None) -> None:
        self._group = dist.new_group(backend=dist.Backend.GLOO, timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint", prepare)
        self._last: Future[None] | None = None
        """The last job of the thread, if it has not been waited for."""

    def save(self, path: Path, tensors: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Copy a checkpoint, and begin to write it. Waits for the one before."""
        self.wait()
        copies: dict[str, Any] = {}
        pickled = io.BytesIO()

        def take() -> None:
            copies.update(_copied(tensors))
            if dist.get_rank() == 0:
                torch.save(dict(rest), pickled)

        on_all_ranks(take, self._group)
        self._last = self._thread.submit(
            write, path, copies, lambda file: file.write(pickled.getbuffer()), group=self._group
        )

    def then(self, step: Callable[[], None]) -> None:
        """Do a step on this process when what is being written is complete; at once where nothing is.

        Args:
            step: without collectives. It is left out where the checkpoint could not be written.
        """
        before = self._last
        if before is None:
            step()
            return

        def after() -> None:
            before.result()
            step()

        self._last = self._thread.submit(after)

    def wait(self) -> None:
        if self._last is not None:
            wait([self._last])
            done, self._last = self._last, None
            done.result()

    def close(self) -> None:
        """Wait, and let go of the thread and the group; nothing can be saved after it. Raises as `wait`."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            dist.destroy_process_group(self._group)


def _copied(tensors: Mapping[str, Any]) -> Any:
    """Return a copy in host memory, of tensors what this process has of them; one copy of what several names show."""
    taken: dict[Any, torch.Tensor] = {}
    known: dict[int, Any] = {}  # what `deepcopy` takes in the place of objects, by their id
    with ordinary_memory(), torch.no_grad():
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                own = local(tensor).detach()
                key: Any = (own.device, own.data_ptr(), own.dtype, own.shape, own.stride())
                if type(own) is not torch.Tensor:  # it may have no memory, and so no address
                    key = id(tensor)
                if key not in taken:
                    taken[key] = own.to("cpu", copy=True)
                known[id(tensor)] = sharded_like(taken[key], tensor)
        return copy.deepcopy(tensors, known)
