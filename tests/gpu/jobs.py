"""The training runs that the checks look at: a transformer of the size that suits the device."""

import contextlib
import gc
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_cxl.devices import device_type_of
from lightning_cxl.gradients.step import Updates
from lightning_cxl.memory.resource import PoolResource
from lightning_cxl.optim.cpu_adam import AdamStep
from lightning_cxl.run import run
from tests import apart, training_device
from tests.integration.training import make_trainer
from tests.models import Task, TinyTransformer

STEPS = 6


Weights = dict[str, torch.Tensor]


class Size(NamedTuple):
    width: int
    length: int
    batch: int


def size() -> Size:
    """Return what a real device needs time for; on the device that only rehearses, what is done at once."""
    return Size(1024, 1024, 8) if training_device.chosen.type == "cuda" else Size(64, 64, 2)


def unit_bytes() -> int:
    width = size().width
    return 4 * (12 * width * width + 13 * width)


class Batches(Dataset):
    """Tokens of these lengths; `act` is called with how many steps are over, when the next batch is asked for.

    Hooks at the ends of steps would do so, too, but with one of them updates do not run behind the backward.
    """

    def __init__(self, lengths: list[int], act: Callable[[int], None]) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = [torch.randint(0, 64, (size().batch, length + 1), generator=generator) for length in lengths]
        self._act = act

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._act(index)
        return self._tokens[index][:, :-1], self._tokens[index][:, 1:]


RESIDENT = {"stream_weights": False, "activation_offload": False}
"""The strategy, with only the optimizer on the host."""
STREAMED: dict[str, Any] = {"stream_weights": "auto"}


def fit(
    options: dict[str, Any],
    depth: int = 4,
    lengths: list[int] | None = None,
    act: Callable[[int], None] = lambda _: None,
    **trainer: Any,
) -> Task:
    """Train from a fixed seed with options of the strategy, and return the module."""
    run.Run.min_activation_bytes = 1
    lengths = lengths or [size().length] * STEPS
    seed_everything(11, verbose=False)
    model = TinyTransformer(vocab=64, width=size().width, depth=depth, dropout=0.0)
    job = Task(model, scheduler=False, lr=1e-3)  # reads losses at the end: the host never waits for the device
    at_the_end = LambdaCallback(on_train_end=lambda *_: act(len(lengths)))
    callbacks = [at_the_end, *trainer.pop("callbacks", ())]
    loader = DataLoader(Batches(lengths, act), batch_size=None)
    make_trainer(options, max_steps=len(lengths), callbacks=callbacks, **trainer).fit(job, loader)
    return job


def train(options: dict[str, Any], precision: str, **trainer: Any) -> tuple[list[float], Weights]:
    """Train with torch's own AdamW, which computes alike wherever it is, and return losses and weights."""
    job = fit({"cpu_adam": False, **options}, precision=precision, **trainer)
    weights = {name: value.detach().cpu().clone() for name, value in job.state_dict().items()}
    return job.losses, weights


def bytes_left() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    training_device.clear_workspaces()
    return torch.accelerator.memory_allocated(training_device.chosen.index)


def peak(depth: int) -> dict[str, int]:
    """Return the most that a run of so many units allocated and reserved, and how often the allocator had to retry."""
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_stats().get("num_alloc_retries", 0)
    fit({"on_overflow": "ignore"}, depth)
    retries = torch.accelerator.memory_stats().get("num_alloc_retries", 0) - before
    return {
        "allocated": torch.accelerator.max_memory_allocated(),
        "reserved": torch.accelerator.max_memory_reserved(),
        "retries": retries,
    }


@contextlib.contextmanager
def recording(intervals: dict[str, list[tuple[float, float]]]) -> Iterator[None]:
    """Fill intervals, in seconds, by kind: ``kernel``, ``h2d`` and ``d2h``."""
    if training_device.chosen.type == "apart":
        with apart.timeline() as entries:
            yield
        for entry in entries:
            intervals.setdefault(entry.kind, []).append((entry.start, entry.end))
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = "h2d" if "HtoD" in event.name else "d2h" if "DtoH" in event.name else "kernel"
            when = event.time_range
            intervals.setdefault(kind, []).append((when.start / 1e6, when.end / 1e6))


def copies_beside_compute() -> dict[str, float]:
    """Return how long copies and kernels of the last step took, and for how long of that both ran at the same time."""
    if training_device.chosen.type == "apart":
        apart.set_delay(kernel=2e-4, h2d=2e-3)
    intervals: dict[str, list[tuple[float, float]]] = {}
    recorded, updates = recording(intervals), []

    def record(steps: int) -> None:
        if steps >= STEPS - 1:
            torch.accelerator.synchronize()
            recorded.__enter__() if steps < STEPS else recorded.__exit__(None, None, None)

    updating = Updates._updating

    def counted(*arguments):
        job = updating(*arguments)
        return lambda: (updates.append(1), job())

    with mock.patch.object(Updates, "_updating", counted):
        fit({"on_overflow": "ignore"}, 8, act=record)
    h2d, kernels = (_union(intervals[kind]) for kind in ("h2d", "kernel"))
    both = _length(h2d) + _length(kernels) - _length(_union(h2d + kernels))
    return {"updates_behind_backward": len(updates), "h2d_s": _length(h2d), "h2d_beside_compute_s": both}


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def registrations_by_step() -> tuple[list[int], int]:
    """Train on lengths that change; return how often the driver was asked in each step, and the bytes in all."""
    if training_device.chosen.type != "cuda":
        PoolResource.__init__.__defaults__ = (64 * 1024,)  # tiny inputs are to be large ones
    kind, calls = device_type_of(training_device.chosen), []
    register = kind.register

    def noted(address: int, nbytes: int) -> None:
        register(address, nbytes)
        calls.append(nbytes)

    kind.register = noted
    seen: list[int] = []
    draw, longest = random.Random(3), 4 * size().length
    lengths = [longest, longest, *(draw.randint(longest // 4, longest) for _ in range(18))]
    fit(STREAMED, 6, lengths, act=lambda _: seen.append(len(calls)))
    return [after - before for before, after in itertools.pairwise(seen)], sum(calls)


def fail_in(where: str) -> str:
    """Run out of memory once in a training step and return the error's text."""
    calls: list[nn.Module] = []

    def too_much(module: nn.Module, *_: Any) -> None:
        calls.append(module)
        in_backward = torch._C._current_graph_task_id() != -1
        if len(calls) > 8 and in_backward == (where == "recompute"):
            torch.empty(1 << 46, dtype=torch.uint8, device=training_device.chosen)

    if training_device.chosen.type == "apart":
        apart.set_capacity(1 << 30)

    class Break(Callback):
        def on_train_start(self, trainer, module) -> None:
            module.model.blocks[2].norm1.register_forward_pre_hook(too_much)

    no_room = mock.patch.object(AdamStep, "apply", side_effect=torch.OutOfMemoryError("no memory in an update"))
    try:
        with no_room if where == "update" else contextlib.nullcontext():
            fit({"on_overflow": "ignore"}, callbacks=[] if where == "update" else [Break()])
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    raise AssertionError(f"nothing failed in {where}")
