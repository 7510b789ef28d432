"""`Ranks`: processes that meet and then run one function after another together, as the ranks of a run do."""

import contextlib
import gc
import os
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist

from tests import processes

START_S, RUN_S = 300, 240
Task = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Meeting(NamedTuple):
    world: int
    file: str


class RankError(AssertionError):
    """A function has failed on some ranks."""


class Processes:
    """Processes that train on one kind of device, started when they are needed, and anew when one does not answer.

    As many of them as a function needs are a process group of gloo; after an error of all, they make a new one. On the
    device apart each has one of its own. They meet in a folder.
    """

    def __init__(self, device: str, folder: Path) -> None:
        self._device, self._folder, self._num_meetings = device, folder, 0
        self._world = 0  # in the group; 0: there is none
        self._results = processes.context().Queue()
        self._tasks: list[Any] = []
        self._processes: list[Any] = []

    def run(self, world: int, task: Task) -> list[Any]:
        """Return what a function returns on each of `world` ranks."""
        if not all(process.is_alive() for process in self._processes):
            self.close()
        self.start(world)
        if self._world != world:
            self._meet(world)
        return self._together(world, task, RUN_S)

    def part(self) -> None:
        """End the group: what a module has left in the processes stays its own as far as `_part` knows it."""
        if self._world:
            self._together(len(self._processes), None, RUN_S)
            self._world = 0

    def close(self) -> None:
        """End the processes; Python's own way out takes them longer than most tests."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._tasks, self._processes, self._world = [], [], 0
        self._results = processes.context().Queue()

    def start(self, world: int) -> None:
        """Start so many processes, with the environment that is this process's now."""
        for rank in range(len(self._processes), world):
            self._tasks.append(processes.context().Queue())
            self._processes.append(processes.start(_serve, rank, self._device, self._tasks[rank], self._results))

    def _meet(self, world: int) -> None:
        self.part()
        self._num_meetings += 1
        file = self._folder / f"meeting-{self._device}-{self._num_meetings}"
        self._together(world, Meeting(world, str(file)), START_S)
        self._world = world

    def _together(self, world: int, task: "Task | Meeting | None", timeout_s: float) -> list[Any]:
        for tasks in self._tasks[:world]:
            tasks.put(task)
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(results) + len(errors) < world:
            try:  # who waits for a rank that has failed does not answer
                rank, result, error = self._results.get(timeout=10 if errors else timeout_s)
            except queue.Empty:
                break
            if error is None:
                results[rank] = result
            else:
                errors[rank] = error
        if len(results) < world:
            texts = [f"rank {rank}:\n{text}" for rank, text in sorted(errors.items())]
            if silent := sorted(set(range(world)) - results.keys() - errors.keys()):
                self.close()
                texts.append(f"no answer from ranks {silent}")
            else:
                self.part()
            raise RankError("\n".join(texts))
        return [results[rank] for rank in range(world)]


@contextlib.contextmanager
def ranks_apart(world: int) -> "Iterator[Ranks]":
    """Give ranks that each have a device apart of their own; they end after the block."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Processes("apart", Path(folder))) as started:
        started.start(world)
        yield Ranks(started, world)


class Ranks(NamedTuple):
    """The first `world` of some processes."""

    processes: Processes
    world: int

    def run(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
        """Return what a function of a module returns on each rank; a `RankError` has all tracebacks."""
        return self.processes.run(self.world, (function, args, keywords))


def of_rank_0(pool: Any, world: int, train: Callable[..., dict[str, Any]], *args: Any, **keywords: Any) -> Any:
    """Return what rank 0 has of a run, where all have the same losses, norms and weights; one rank is this process."""
    if world == 1:
        return train(*args, **keywords)
    results = pool.of(world).run(train, *args, **keywords)
    first = results[0]
    for each in results[1:]:
        assert (each["losses"], each.get("norms")) == (first["losses"], first.get("norms"))
        assert [name for name, value in each["weights"].items() if not torch.equal(value, first["weights"][name])] == []
    return first


def gone_on(pool: Any, train: Callable[..., dict[str, Any]], before: int, after: int, path: str, **given: Any) -> Any:
    """Return the second half of a run that other ranks go on with from a checkpoint, and of one that did not end."""
    of_rank_0(pool, before, train, 3, save=path, **given)
    rest = of_rank_0(pool, after, train, 6, resume=path, **given)
    whole = of_rank_0(pool, before, train, 6, **given)
    return rest, {**whole, "losses": whole["losses"][3:]}


@contextlib.contextmanager
def _on_a_device() -> Iterator[None]:
    from tests import apart, training_device

    # torch, which compiles the CPU kernels of bitsandbytes, does not know the device
    with training_device.on_chosen(), torch._dynamo.config.patch(disable=True):
        apart.set_poison(True, when_taken=True)  # FSDP2 gives gradients back that are still read, see there
        try:
            yield
        finally:
            torch.accelerator.set_device_index(0)  # Fabric has chosen another
        if (bitsandbytes := sys.modules.get("bitsandbytes.backends.utils")) is not None:
            bitsandbytes._code_4bit_cache.clear()  # tables that would stay on the device


def _serve(rank: int, device: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    backend, scope = "gloo", contextlib.nullcontext
    if device == "apart":
        from tests import training_device
        from tests.apart import process_group

        training_device.choose(device)
        process_group.register()
        backend, scope = f"cpu:{process_group.BACKEND},apart:{process_group.BACKEND}", _on_a_device
    environ = dict(os.environ)
    while True:
        task, result = tasks.get(), None
        try:
            if task is None:
                _part(environ)
            elif isinstance(task, Meeting):
                _meet(rank, task, backend)
            else:
                function, args, keywords = task
                with scope():
                    result = function(*args, **keywords)
            results.put((rank, result, None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))


def _meet(rank: int, meeting: Meeting, backend: str) -> None:
    world = meeting.world
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    limit = timedelta(seconds=RUN_S)
    dist.init_process_group(backend, init_method=f"file://{meeting.file}", rank=rank, world_size=world, timeout=limit)


def _part(environ: dict[str, str]) -> None:
    """End the group, and forget what libraries remember."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environ)
    torch.set_default_dtype(torch.float32)
    processes.forget_libraries()
