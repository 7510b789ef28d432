"""Several processes, each with a device apart of its own, that do what a test asks.

Processes live as long as the test's module, for each takes seconds to import torch. A function runs in all of them at
once, and gives what it returns, rank by rank. It must be one of a module; arguments and results are pickled.
"""

import contextlib
import gc
import importlib
import inspect
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE_S = 180.0
_ROOT = Path(__file__).parents[2]


class Ranks:
    """Asks processes; made by `started`."""

    def __init__(self, pipes: list) -> None:
        self._pipes = pipes

    def run(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """Return what every rank returns.

        Raises:
            AssertionError: a rank raised, or a race was seen there; with its traceback.
        """
        for pipe in self._pipes:
            pipe.send((_module(function), function.__name__, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(_PATIENCE_S), f"rank {rank} has not answered for {_PATIENCE_S} s"
            answers.append(pipe.recv())
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(answers) if error]
        assert not errors, "\n".join(errors)
        return [result for _, result in answers]


@contextlib.contextmanager
def started(number: int) -> Iterator[Ranks]:
    """Start so many processes; end them after the block."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(number):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, number, os.path.join(folder, "store"), there))
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            yield Ranks(pipes)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(30)
                if process.is_alive():
                    process.kill()
                    process.join()


def _serve(rank: int, number: int, store: str, pipe) -> None:
    from tests import apart
    from tests.apart import process_group

    torch.set_num_threads(1)
    apart.load()
    process_group.register()
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    dist.init_process_group(
        f"cpu:{process_group.BACKEND},apart:{process_group.BACKEND}",
        store=dist.FileStore(store, number),
        rank=rank,
        world_size=number,
        timeout=timedelta(seconds=_PATIENCE_S / 3),
    )
    with contextlib.suppress(EOFError, OSError):  # the test has ended
        while True:
            module, name, args = pipe.recv()
            pipe.send(_answer(module, name, args))
    dist.destroy_process_group()


def _module(function: Callable[..., Any]) -> str:
    """Return the name of its module as another process can import it; pytest's is another one."""
    return ".".join(Path(inspect.getfile(function)).relative_to(_ROOT).with_suffix("").parts)


def _answer(module: str, name: str, args: tuple) -> tuple[str | None, Any]:
    from tests import apart

    try:
        apart.reset()
        apart.set_poison(True, when_taken=True)
        result = getattr(importlib.import_module(module), name)(*args)
        torch.accelerator.synchronize()
        seen = apart.clear_violations()
        return ("\n".join(seen) or None), result
    except BaseException:
        return traceback.format_exc(), None
    finally:
        apart.reset()
        gc.collect()
