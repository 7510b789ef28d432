"""Chains of others' steps for the whole path: bf16 gradients, checked and clipped, to new bf16 weights."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from adam_bench import peers
from adam_bench.contenders import torch_adamw
from adam_bench.problems import Problem
from adam_bench.tensors import zeroed

Run = Callable[[], object]


class MasterChain:
    """Float32 master weights and float32 copies of the gradients beside a bf16 problem, as peers need them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.masters = [parameter.detach().float() for parameter in problem.parameters]
        self.wide_gradients = zeroed(problem.gradients, torch.float32)

    @property
    def wide(self) -> Problem:
        """The same problem in float32 on the masters, with shared momentum and variance."""
        parameters = [torch.nn.Parameter(master) for master in self.masters]
        return replace(self.problem, parameters=parameters, gradients=self.wide_gradients)

    def around(self, step: Run) -> Run:
        """Return upcast, `step` on the masters, downcast."""
        compute = [parameter.detach() for parameter in self.problem.parameters]

        def run() -> None:
            torch._foreach_copy_(self.wide_gradients, self.problem.gradients)
            step()
            torch._foreach_copy_(compute, self.masters)

        return run


def torch_check(gradients: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return torch's check for non-finite gradients with unscaling, and their norm."""
    found, inverse_scale = torch.zeros(1), torch.ones(1)
    tensors = list(gradients)

    def run() -> torch.Tensor:
        found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, inverse_scale)
        assert not found.item()
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
        return norm

    return run


def torch_prepare(gradients: Sequence[torch.Tensor], max_norm: float) -> Run:
    """Return torch's check, unscaling, norm and clipping: as `GradScaler.unscale_` and `clip_grad_norm_` do it."""
    check, tensors = torch_check(gradients), list(gradients)

    def run() -> None:
        torch._foreach_mul_(tensors, (max_norm / (check() + 1e-6)).clamp(max=1.0))

    return run


def deepspeed_check(gradients: Sequence[torch.Tensor]) -> Callable[[], float]:
    """Return DeepSpeed's check for non-finite gradients and its norm in float64."""
    utilities: Any = importlib.import_module("deepspeed.runtime.utils")

    def run() -> float:
        assert not any(utilities.has_inf_or_nan(gradient) for gradient in gradients)
        squares = sum(gradient.double().norm(2).item() ** 2 for gradient in gradients)
        return float(squares**0.5)

    return run


def deepspeed_prepare(gradients: Sequence[torch.Tensor], max_norm: float) -> Run:
    """Return DeepSpeed's check, norm, and unscaling together with clipping."""
    check = deepspeed_check(gradients)

    def run() -> None:
        scale = max(1.0, (check() + 1e-6) / max_norm)
        for gradient in gradients:
            gradient.mul_(1.0 / scale)

    return run


def torch_update(chain: MasterChain) -> Run:
    """Return upcast, torch's fused AdamW, downcast."""
    return chain.around(torch_adamw(chain.wide, fused=True))


def deepspeed_update(chain: MasterChain) -> Run:
    """Return upcast, DeepSpeed's CPUAdam, downcast."""
    return chain.around(peers.deepspeed_adam(chain.wide))


def compiled_update(chain: MasterChain) -> Callable[[float], None]:
    """Return a compiled update that reads bf16 gradients and writes masters and bf16 weights."""
    return peers.compiled_step(chain.problem, chain.masters, chain.problem.parameters)


def compiled_chain(chain: MasterChain, max_norm: float) -> Run:
    """Return the compiled check, then the compiled update with the factor that clips."""
    check, update = peers.compiled_check(chain.problem.gradients), compiled_update(chain)

    def run() -> None:
        update(min(1.0, max_norm / (check() + 1e-6)))

    return run


def in_turn(*runs: Run) -> Run:
    """Return one that runs all in order."""

    def run() -> None:
        for part in runs:
            part()

    return run
