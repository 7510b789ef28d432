"""How long a step is on a device with given times, beside the best that what depends on what allows.

    python examples/lab/step_time.py [--quick] [--json FILE]

A Trainer trains with the strategy, on the simulated device of `tests/apart`: each of its operators takes 5 ms, seven
of them a block, and it computes beside the host and the copies as a GPU does. A copy of a block takes a tenth of its
compute, or what the last rows say. Models are blocks of equal weights, and an embedding and a head that are as large
beside them as those of Llama 3.2 1B, 3.1 8B and 3.1 70B. An update takes as long as its weights are large; all of them
take the compute of a micro-batch times `adam`. On a busy machine, give it a real-time priority (`chrt -f 10`). It needs
what tests need (`pip install -e '.[test]'`, a C++ compiler).

*longest* is the longest of compute, updates and copies to the device. *best* counts what has to come one after the
other as well:

* The last gradients are those of the first block and of the embedding, which the next forward needs first: their way
  to the host, their updates and their way back are beside no compute, unless updates are behind anyway.
* All updates of a step are over when the next forward ends, and the first of the next step needs a gradient: that of
  the head. Meanwhile the worker has nothing to do.
* With clipping, no update begins before the last gradient has come, and all end with the next forward.
* With accumulation, updates have the last backward of a step and the first forward of the next.
* Copies of a forward are beside the forward, and those of a backward beside the backward.
"""

import argparse
import itertools
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import bench_path  # noqa: F401  # where `results` is
import torch
from results import Results, machine, print_columns
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2]))

import lightning.pytorch as pl

from lightning_cxl import CXLOffloadStrategy
from lightning_cxl.optim.cpu_adam import AdamStep, Update
from tests import apart, training_device
from tests.apart_accelerator import ApartAccelerator

GOAL = 1.05
KERNEL_S = 0.005
COPY_S = 0.0035
FORWARD_S, BACKWARD_S = 2 * KERNEL_S, 5 * KERNEL_S
"""Of a block."""
NUM_SLOTS = 3
_WIDTH = 64


class Shape(NamedTuple):
    """A model: blocks, and weights of embedding (and head) in those of a block."""

    name: str
    num_blocks: int
    embedding: float
    is_tied: bool

    @property
    def num_weights(self) -> float:
        return self.num_blocks + self.embedding * (1 if self.is_tied else 2)


SHAPES = (
    Shape("1B, 16 blocks", 16, 4.3, True), Shape("8B, 32 blocks", 32, 2.4, False),
    Shape("70B, 80 blocks", 80, 1.23, False),
)  # fmt: skip


class Block(nn.Module):
    """Two operators in its forward, two more in its recompute and three in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.weight)


class Job(pl.LightningModule):
    """Notes when the host began each step, had queued all blocks of each forward, and had queued all of it."""

    def __init__(self, shape: Shape, accumulation: int, steps: int) -> None:
        super().__init__()
        rows = int(_WIDTH * shape.embedding)
        self.embedding = nn.Embedding(rows, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(shape.num_blocks))
        self.head = nn.Linear(_WIDTH, rows, bias=False)
        if shape.is_tied:
            self.head.weight = self.embedding.weight
        self.accumulation, self.steps = accumulation, steps
        self.began_s: list[float] = []
        self.blocks_s: list[float] = []
        self.forward_s: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = self.embedding(batch)
        for block in self.blocks:
            x = block(x)
        self.blocks_s.append(time.perf_counter())
        loss = self.head(x).mean()
        self.forward_s.append(time.perf_counter())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> Any:
        return _Batches(self)


class _Batches:
    def __init__(self, job: Job) -> None:
        self._job = job

    def __len__(self) -> int:
        return self._job.steps * self._job.accumulation

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(len(self)):
            if index % self._job.accumulation == 0:
                self._job.began_s.append(time.perf_counter())
            yield torch.arange(_WIDTH)


class Times(NamedTuple):
    """Seconds that the device computes in a micro-batch, in all and in parts."""

    forward_s: float
    backward_s: float
    head_s: float
    """Forward of what follows the last block."""
    turn_s: float
    """That, and the backward until its first gradient."""


@dataclass(frozen=True)
class Cell:
    """One setting of a step."""

    shape: Shape
    adam: float
    """Seconds of all updates, in seconds of compute of a micro-batch."""
    clip: bool
    accumulation: int
    copy_s: float = COPY_S

    @property
    def name(self) -> str:
        clip = "clipping" if self.clip else "no clipping"
        copies = "" if self.copy_s == COPY_S else f", copies {self.copy_s / (FORWARD_S + BACKWARD_S):g}"
        return f"{self.shape.name}, adam {self.adam:g}, {clip}, accumulation {self.accumulation}{copies}"

    def longest_s(self, times: Times) -> float:
        num_copies = 2 * self.shape.num_blocks - NUM_SLOTS
        micro_batch_s = max(times.forward_s + times.backward_s, num_copies * self.copy_s)
        return max(self.accumulation * micro_batch_s, self.adam * (times.forward_s + times.backward_s))

    def best_s(self, times: Times) -> float:
        adam_s = self.adam * (times.forward_s + times.backward_s)
        forward_s = times.forward_s + self.shape.num_blocks * max(0.0, self.copy_s - FORWARD_S)
        backward_s = times.backward_s + (self.shape.num_blocks - NUM_SLOTS) * max(0.0, self.copy_s - BACKWARD_S)
        first_s = adam_s * self.shape.embedding / self.shape.num_weights
        first_s += max(0.0, adam_s / self.shape.num_weights - 2 * KERNEL_S)  # the block's gradient comes before
        first_s += 2 * self.copy_s
        # with the weights that are updated last a block computes, or the head
        after_last_s = 2 * self.copy_s + (FORWARD_S if self.shape.is_tied else 0.0)
        if self.clip:
            both_s = backward_s + max(first_s + forward_s, adam_s + after_last_s + times.head_s)
        else:
            both_s = max(forward_s + backward_s + first_s, adam_s + after_last_s + times.turn_s)
        return (self.accumulation - 1) * (forward_s + backward_s) + both_s


CELLS = [
    *itertools.starmap(Cell, itertools.product(SHAPES, (0.3, 1.0, 1.5), (False, True), (1, 4))),
    *(Cell(SHAPES[1], 0.3, False, 1, part * (FORWARD_S + BACKWARD_S)) for part in (0.25, 0.5, 1.0)),
]
QUICK = [Cell(SHAPES[0], 1.0, clip, 1) for clip in (False, True)]


class SlowUpdates:
    """Inside, an update takes as long as its weights are large."""

    def __init__(self) -> None:
        self.per_weight_s = 0.0
        self._apply = AdamStep.apply

    def __enter__(self) -> "SlowUpdates":
        original = self._apply

        def apply(step: AdamStep, updates: Sequence[Update], scale: float) -> None:
            end_s = time.perf_counter() + self.per_weight_s * sum(each.grad.numel() for each in updates)
            original(step, updates, scale)
            time.sleep(max(0.0, end_s - time.perf_counter()))

        AdamStep.apply = apply  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        AdamStep.apply = self._apply  # type: ignore[method-assign]


def train(cell: Cell, steps: int) -> tuple[list[float], Sequence[apart.Entry], Job]:
    """Return the seconds of each step but the first and the last, what the device did, and when it was queued."""
    job = Job(cell.shape, cell.accumulation, steps + 2)  # the last one has no end
    strategy = CXLOffloadStrategy(
        units=["Block"], stream_weights=True, overlap_step=True, on_overflow="skip" if cell.clip else "ignore"
    )
    trainer = pl.Trainer(
        accelerator=ApartAccelerator(), devices=1, strategy=strategy, precision="bf16-true", max_steps=job.steps,
        accumulate_grad_batches=cell.accumulation, gradient_clip_val=1.0 if cell.clip else None, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    apart.set_delay(kernel=KERNEL_S, h2d=cell.copy_s, d2h=cell.copy_s)
    with apart.timeline() as entries:
        trainer.fit(job)
    seconds = [end - begin for begin, end in itertools.pairwise(job.began_s)]
    return seconds[1:], entries, job


def times_of(entries: Sequence[apart.Entry], job: Job) -> Times:
    """Add up what the last step but one had the device compute, by when the host queued it; of one micro-batch each."""
    begin_s, end_s = job.began_s[-2:]
    found = [each for each in entries if begin_s <= each.queued < end_s]
    computing = statistics.mode(each.stream for each in found if each.kind == "kernel")
    blocks_s, forward_s = job.blocks_s[-2], job.forward_s[-2]
    gradient_s = min(each.queued for each in found if each.kind == "d2h" and each.queued > forward_s)

    def between(begin_s: float, end_s: float) -> float:
        kernels = (each for each in found if each.kind == "kernel" and each.stream == computing)
        return sum(each.end - each.start for each in kernels if begin_s <= each.queued < end_s)

    parts = (begin_s, forward_s), (forward_s, end_s), (blocks_s, forward_s), (blocks_s, gradient_s)
    return Times(*(between(*part) for part in parts))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cells, few steps: shows whether it runs")
    parser.add_argument("--only", metavar="TEXT", default="", help="cells whose names have it: '8B', 'copies'")
    parser.add_argument("--steps", type=int, default=5, help="that are measured (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    args = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning)
    training_device.choose("apart")
    if training_device.unavailable is not None:
        raise SystemExit(training_device.unavailable)
    results = Results(machine(torch.get_num_threads()))
    steps = 2 if args.quick else args.steps
    rows: list[Sequence[str]] = [("", "step s", "spread", "x longest", "best x longest", "x best")]
    times: dict[Shape, Times] = {}
    with SlowUpdates() as updates, training_device.on_chosen():
        for cell in QUICK if args.quick else [cell for cell in CELLS if args.only in cell.name]:
            if cell.shape not in times:
                updates.per_weight_s = 0.0
                times[cell.shape] = times_of(*train(Cell(cell.shape, 0.0, False, 1), 2)[1:])
            found = times[cell.shape]
            adam_s = cell.adam * (found.forward_s + found.backward_s)
            updates.per_weight_s = adam_s / (cell.shape.num_weights * _WIDTH * _WIDTH)
            seconds = train(cell, steps)[0]  # the model goes
            step_s, best_s, longest_s = statistics.median(seconds), cell.best_s(found), cell.longest_s(found)
            results.at_most(cell.name, step_s / best_s, "x best", GOAL)
            results.add(f"{cell.name}: of the longest", step_s / longest_s, "x longest")
            spread = (max(seconds) - min(seconds)) / step_s
            ratios = step_s / longest_s, best_s / longest_s, step_s / best_s
            rows.append((cell.name, f"{step_s:.3f}", f"{spread:.0%}", *(f"{ratio:.3f}" for ratio in ratios)))
    print_columns(rows)
    print(f"\n{results.summary()}")
    if args.json:
        results.write(args.json)


if __name__ == "__main__":
    main()
