"""`AsyncSaves`: several processes write a checkpoint together while they train on.

[Note: Saves behind the training]
`save` copies what this process has of the checkpoint to host memory, and returns; a thread writes the copy, as
[Note: Sharded checkpoints] says. What is no tensor is pickled at once. So a checkpoint has the values of the moment of
the call, whatever is updated after it.

* The threads of all processes agree in a process group of their own. A group serves one collective after the other, in
  the same order everywhere, and nobody knows when a thread comes to its next one. So none of the training's is used. A
  main thread uses theirs where nothing is being written.
* One checkpoint is written at a time, and there is one copy: the next `save` waits.
* An error of one process is one of all, as in every save. All raise it when they wait: at the next `save` or `wait`, or
  at the end (`close`). A step after it (`then`) is of one process alone, and so is its error.
* Who removes an older checkpoint right after a save does so when the new one has its name (`then`), and not at all
  where that has failed. So a run that is killed at any moment leaves a whole checkpoint.
"""

import copy
import io
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_cxl.memory.hook import ordinary_memory
from lightning_cxl.run.sharded_checkpoint import write
from lightning_cxl.sharding.agreement import on_all_ranks
from lightning_cxl.shards import local, sharded_like
from lightning_cxl.torch_private import tree_leaves


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
        """What the thread does last, of what nobody has waited for."""

    def save(self, path: Path, tensors: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Copy a checkpoint, and begin to write it. Waits for the one before.

        Args:
            path: see `sharded_checkpoint.save`; `tensors` and `rest`, too.
            tensors: may change when this returns.
            rest: may change when this returns.

        Raises:
            CheckpointError: the one before could not be written. This one is not begun.
            LightningCXLError: a process could not copy its part: memory is full, or something cannot be pickled.
        """
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
        """Return when nothing is being written.

        Raises:
            CheckpointError: the last checkpoint could not be written. It is raised once.
            OSError: a step after it has failed on this process.
        """
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
