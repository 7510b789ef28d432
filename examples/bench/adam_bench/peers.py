"""Other people's Adam for the same job: DeepSpeed's, bitsandbytes', torchao's, and a compiled short function.

Each function returns what is to be timed, and raises where its package is missing.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from adam_bench.contenders import BETAS, EPS, LR, WEIGHT_DECAY
from adam_bench.problems import Problem

Run = Callable[[], object]

_OPTIONS: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


def deepspeed_adam(problem: Problem) -> Run:
    """Return a step of DeepSpeed's CPUAdam, which it compiles when it is made for the first time."""
    cpu_adam: Any = importlib.import_module("deepspeed.ops.adam")
    optimizer = cpu_adam.DeepSpeedCPUAdam(problem.parameters, **_OPTIONS)
    for parameter, state in problem.states():
        optimizer.state[parameter] = {"step": 1, **state}
    step: Run = optimizer.step
    return step


def bitsandbytes_adamw8bit(problem: Problem) -> Run:
    """Return a step of bitsandbytes' AdamW8bit, with state of its own."""
    library: Any = importlib.import_module("bitsandbytes")
    step: Run = library.optim.AdamW8bit(problem.parameters, **_OPTIONS).step
    return step


def torchao_adamw8bit(problem: Problem) -> Run:
    """Return a step of torchao's AdamW8bit, with state of its own; torch compiles it in the first step."""
    library: Any = importlib.import_module("torchao.optim")
    step: Run = library.AdamW8bit(problem.parameters, **_OPTIONS).step
    return step


# -- a short function, compiled ----------------------------------------------------------------------------------------


def _update(
    gradient: torch.Tensor,
    factor: torch.Tensor,
    weight: torch.Tensor,
    momentum: torch.Tensor,
    variance: torch.Tensor,
    bias1: torch.Tensor,
    bias2_sqrt: torch.Tensor,
) -> None:
    wide = gradient.float() * factor
    momentum.lerp_(wide, 1 - BETAS[0])
    variance.mul_(BETAS[1]).addcmul_(wide, wide, value=1 - BETAS[1])
    denominator = variance.sqrt() / bias2_sqrt + EPS
    weight.mul_(1 - LR * WEIGHT_DECAY).sub_(LR / bias1 * momentum / denominator)


def _update_and_round(
    gradient: torch.Tensor,
    factor: torch.Tensor,
    weight: torch.Tensor,
    momentum: torch.Tensor,
    variance: torch.Tensor,
    bias1: torch.Tensor,
    bias2_sqrt: torch.Tensor,
    compute: torch.Tensor,
) -> None:
    _update(gradient, factor, weight, momentum, variance, bias1, bias2_sqrt)
    compute.copy_(weight)


def _check(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = gradient.float()
    return wide.square().sum(), wide.isfinite().all()


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled for every length, once per process."""
    return torch.compile(function, dynamic=True, fullgraph=True)


def compiled_step(
    problem: Problem, weights: Sequence[torch.Tensor], compute: Sequence[torch.Tensor] | None = None
) -> Callable[[float], None]:
    """Return a compiled AdamW update of float32 weights that takes the factor of the gradients.

    It also writes the weights rounded to 16 bit where `compute` is given.
    """
    steps = itertools.count(2)  # others' state says that one step is behind them
    function = _compiled(_update if compute is None else _update_and_round)
    lists = (problem.gradients, weights, problem.momentum, problem.variance, *(() if compute is None else (compute,)))
    work = list(zip(*([tensor.detach().view(-1) for tensor in tensors] for tensors in lists), strict=True))

    def run(factor: float) -> None:
        step = next(steps)
        # tensors: numbers would be compiled in
        scale, bias1 = torch.tensor(factor), torch.tensor(1 - BETAS[0] ** step)
        bias2_sqrt = torch.tensor((1 - BETAS[1] ** step) ** 0.5)
        for gradient, weight, momentum, variance, *rest in work:
            function(gradient, scale, weight, momentum, variance, bias1, bias2_sqrt, *rest)

    return run


def compiled_check(gradients: Sequence[torch.Tensor]) -> Callable[[], float]:
    """Return a compiled check for non-finite gradients that gives their norm."""
    function = _compiled(_check)
    flat = [gradient.view(-1) for gradient in gradients]

    def run() -> float:
        found = [function(gradient) for gradient in flat]
        assert all(bool(finite) for _, finite in found)
        return float(sum(float(squares) for squares, _ in found) ** 0.5)

    return run
