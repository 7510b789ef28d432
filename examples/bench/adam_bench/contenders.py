"""What the Adam benchmark times: the kernels, the roof of each, and torch's own fused Adam for the same step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timing import Contender

from adam_bench.problems import Problem
from lightning_cxl.commands.calibrate import Sweep, read, update
from lightning_cxl.gradients.guard import GradientMeter
from lightning_cxl.optim.cpu_adam import CPUAdam

OURS, ROOF, FUSED = "CPUAdam", "roof", "torch fused"
MEASURE, PLAIN = "measure", "plain read"

# so small a rate leaves the weights where they are for as long as a benchmark takes
LR, BETAS, EPS, WEIGHT_DECAY = 1e-6, (0.9, 0.999), 1e-8, 0.01

# bytes that a step moves per parameter for momentum and variance, read and written; 8 bit has a float32 per 256
_STATE_TRAFFIC = {"fp32": 16.0, "bf16": 8.0, "8bit": 4.0 + 16 / 256}


@dataclass(frozen=True)
class Options:
    """What the command line chooses for all groups of contenders."""

    num_threads: int
    rounds: int
    sizes: tuple[int, ...]

    @property
    def main_size(self) -> int:
        """The size where only one is measured: the largest that is not above 100 M."""
        return max((size for size in self.sizes if size <= 100_000_000), default=min(self.sizes))


def cpu_adam(problem: Problem, num_threads: int, **options: Any) -> CPUAdam:
    """Return CPUAdam on a problem."""
    return CPUAdam(
        problem.parameters,
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        num_threads=num_threads,
        **options,
    )


def torch_adamw(problem: Problem, **choice: Any) -> Callable[[], object]:
    """Return a step of ``torch.optim.AdamW`` with `fused` or `foreach`."""
    optimizer = torch.optim.AdamW(problem.parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **choice)
    for parameter, state in problem.states():
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **state}
    return optimizer.step


def step_contenders(problem: Problem, num_threads: int) -> list[Contender]:
    """Return the update of float32 parameters: the roof, CPUAdam, and torch's fused AdamW."""

    def roof() -> Sweep:
        tensors = zip(problem.gradients, problem.parameters, problem.momentum, problem.variance, strict=True)
        return Sweep([[read(g), update(w), update(m), update(v)] for g, w, m, v in tensors], num_threads)

    traffic_bytes = 28 * problem.numel
    return [
        Contender(ROOF, roof, traffic_bytes=traffic_bytes),
        Contender(OURS, lambda: cpu_adam(problem, num_threads).step, traffic_bytes=traffic_bytes),
        Contender(FUSED, lambda: torch_adamw(problem, fused=True), traffic_bytes=traffic_bytes),
    ]


def state_contenders(problem: Problem, num_threads: int) -> list[Contender]:
    """Return CPUAdam with each format of the state."""
    # weights are read and written, the remainder of a split master too; gradients are read
    rest = 12 if problem.parameters[0].dtype is torch.float32 else 10

    def contender(state: str) -> Contender:
        traffic_bytes = round(problem.numel * (rest + _STATE_TRAFFIC[state]))
        return Contender(state, lambda: cpu_adam(problem, num_threads, state=state).step, traffic_bytes=traffic_bytes)

    return [contender(state) for state in _STATE_TRAFFIC]


def check_contenders(gradients: Sequence[torch.Tensor], num_threads: int) -> list[Contender]:
    """Return the measuring of gradients, the roof, and a read of them by every thread at one place."""
    traffic_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients)

    def roof(max_places: int) -> Sweep:
        return Sweep([[read(gradient)] for gradient in gradients], num_threads, max_places)

    return [
        Contender(ROOF, lambda: roof(8), traffic_bytes=traffic_bytes),
        Contender(PLAIN, lambda: roof(1), traffic_bytes=traffic_bytes),
        Contender(MEASURE, lambda: gradient_check(gradients, num_threads), traffic_bytes=traffic_bytes),
    ]


def gradient_check(gradients: Sequence[torch.Tensor], num_threads: int) -> Callable[[], float]:
    """Return the measuring of gradients: it gives their norm, which is finite if and only if they are."""
    meter = GradientMeter(num_threads)

    def run() -> float:
        renew(gradients)
        norm = math.sqrt(math.fsum(meter.sums(gradients)))
        assert math.isfinite(norm)
        return norm

    return run


def renew(gradients: Sequence[torch.Tensor]) -> None:
    """Mark gradients as written again: what was measured in the run before must not be used."""
    torch.autograd.graph.increment_version(gradients)
