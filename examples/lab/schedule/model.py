"""A model of equal units that compute by waiting."""

import time
from typing import Any

import torch
from simulation.trace import Trace
from torch import nn

LANE = "compute"


class Timeline:
    """Where units note when they compute; nowhere until there is a trace."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self._forward_ends_s: dict[str, float] = {}  # not kept by the units: a recompute restores a module's attributes

    def add_forward(self, unit: str, start_s: float) -> None:
        self._forward_ends_s[unit] = time.perf_counter()
        if self.trace is not None:
            self.trace.add(LANE, f"{unit} forward", start_s, self._forward_ends_s[unit])

    def add_backward(self, unit: str) -> None:
        """Note a backward that has just ended; it began when the recompute had ended."""
        if self.trace is not None:
            self.trace.add(LANE, f"{unit} backward", self._forward_ends_s[unit], time.perf_counter())


class _BackwardEnd(torch.autograd.Function):
    """The input of a unit as it is; in backward it is reached last, and notes that."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, unit: str, timeline: Timeline) -> torch.Tensor:
        context.unit, context.timeline = unit, timeline
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        context.timeline.add_backward(context.unit)
        return gradient, None, None


class _Wait(torch.autograd.Function):
    """Takes a given time in forward and backward, as a device would that is not this CPU."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float
    ) -> torch.Tensor:
        context.save_for_backward(x, weight)
        context.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        _, weight = context.saved_tensors  # asks for the recompute
        time.sleep(context.backward_s)
        return gradient, torch.zeros_like(weight), None, None


class WaitingUnit(nn.Module):
    """A block whose weights are one tensor, and whose forward and backward take a given time each; notes when."""

    def __init__(self, name: str, timeline: Timeline, num_weights: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.name = name
        self.timeline = timeline
        self.weight = nn.Parameter(torch.zeros(num_weights, dtype=torch.bfloat16))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start_s = time.perf_counter()
        try:
            x = _BackwardEnd.apply(x, self.name, self.timeline)
            return _Wait.apply(x, self.weight, self.forward_s, self.backward_s)
        finally:  # checkpoint() ends a recompute with an exception
            self.timeline.add_forward(self.name, start_s)


class Net(nn.Module):
    """Units one after the other, behind a scale that makes their inputs carry gradient."""

    def __init__(self, units: list[WaitingUnit], timeline: Timeline) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.units = nn.ModuleList(units)
        self.timeline = timeline

    def named_units(self) -> list[tuple[str, nn.Module]]:
        return [(unit.name, unit) for unit in self.units]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale.to(x.dtype)
        for unit in self.units:
            x = unit(x)
        return x.float().mean()
