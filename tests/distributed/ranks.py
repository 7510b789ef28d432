"""`Ranks`: processes that meet once and then run one function after another together, as the ranks of a run do."""

import contextlib
import os
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp

START_S, RUN_S = 300, 240


class RankError(AssertionError):
    """A function has failed on some ranks."""


class Ranks:
    """`world` processes on this machine with a process group of gloo.

    Args:
        world: their number.
        device: what each trains on: ``"cpu"``, or ``"apart"``, where each has a device of its own.
    """

    def __init__(self, world: int, device: str = "cpu") -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._tasks = [context.Queue() for _ in range(world)]
        self._results = context.Queue()
        meeting = str(Path(self._folder.name) / "meeting")
        args = [(rank, world, device, meeting, self._tasks[rank], self._results) for rank in range(world)]
        self._processes = [context.Process(target=_serve, args=each, daemon=True) for each in args]
        for process in self._processes:
            process.start()
        self._collect(START_S)

    def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        """Return what a function of a module returns on each rank.

        Raises:
            RankError: with the tracebacks of all ranks on which it has failed, or who did not answer.
        """
        for tasks in self._tasks:
            tasks.put((function, args, keywords))
        return self._collect(RUN_S)

    def _collect(self, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(results) + len(errors) < self.world:
            try:  # who waits for a rank that has failed does not answer
                rank, result, error = self._results.get(timeout=10 if errors else timeout_s)
            except queue.Empty:
                break
            if error is None:
                results[rank] = result
            else:
                errors[rank] = error
        if len(results) < self.world:
            silent = sorted(set(range(self.world)) - results.keys() - errors.keys())
            self.close()
            texts = [f"rank {rank}:\n{text}" for rank, text in sorted(errors.items())]
            raise RankError("\n".join([*texts, f"no answer from ranks {silent}"]))
        return [results[rank] for rank in range(self.world)]

    @property
    def is_alive(self) -> bool:
        """Whether all processes are there."""
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes."""
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(timeout=5)
            process.kill()
            process.join()
        self._folder.cleanup()


def of_rank_0(pool: Any, world: int, train: Callable[..., dict[str, Any]], *args: Any, **keywords: Any) -> Any:
    """Return what rank 0 has of a run of `world` ranks, where all have the same losses and norms.

    Args:
        pool: gives ranks; a run of one is in this process.
        world: their number.
        train: returns ``losses`` and ``norms`` among others.
    """
    if world == 1:
        return train(*args, **keywords)
    results = pool.of(world).run(train, *args, **keywords)
    for each in results[1:]:
        assert (each["losses"], each["norms"]) == (results[0]["losses"], results[0]["norms"])
    return results[0]


@contextlib.contextmanager
def _on_a_device() -> Iterator[None]:
    from tests import apart, training_device

    # torch, which compiles the CPU kernels of bitsandbytes, does not know the device
    with training_device.on_chosen(), torch._dynamo.config.patch(disable=True):
        apart.set_poison(True, when_taken=True)  # FSDP2 gives gradients back that are still read, see there
        yield
        if (bitsandbytes := sys.modules.get("bitsandbytes.backends.utils")) is not None:
            bitsandbytes._code_4bit_cache.clear()  # tables that would stay on the device


def _serve(rank: int, world: int, device: str, meeting: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    backend, scope = "gloo", contextlib.nullcontext
    if device == "apart":
        from tests import training_device
        from tests.apart import process_group

        training_device.choose(device)
        process_group.register()
        backend, scope = f"cpu:{process_group.BACKEND},apart:{process_group.BACKEND}", _on_a_device
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    limit = timedelta(seconds=RUN_S)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=limit)
    results.put((rank, None, None))
    while (task := tasks.get()) is not None:
        function, args, keywords = task
        try:
            with scope():
                result = function(*args, **keywords)
            results.put((rank, result, None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
    dist.destroy_process_group()
