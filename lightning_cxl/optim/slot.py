"""`Slot`: step count, momentum and variance of one parameter, in memory that stays where it was placed."""

from collections.abc import Callable
from typing import Any

import torch

from lightning_cxl.errors import ConfigError
from lightning_cxl.optim.layout import check_parameter, laid_out_as, same_layout
from lightning_cxl.tiers.placement import TensorRole

AllocateState = Callable[[torch.Tensor, TensorRole], torch.Tensor]
"""Returns a dense float32 host tensor of a parameter's shape, contents undefined, for MOMENTUM or VARIANCE."""


def empty_like_parameter(parameter: torch.Tensor, role: TensorRole) -> torch.Tensor:
    """Return memory from torch's own allocator, whatever the role."""
    return torch.empty_like(parameter, requires_grad=False, memory_format=torch.preserve_format)


class Slot:
    """Adam's state of one parameter.

    Args:
        parameter: dense, float32, on the host.
        allocate: gives the memory, which is held from now on.
    """

    __slots__ = ("momentum", "numel", "step", "variance")

    def __init__(self, parameter: torch.Tensor, allocate: AllocateState) -> None:
        self.numel = parameter.numel()
        self.step = torch.zeros((), dtype=torch.float32)
        self.momentum = _reserve(parameter, TensorRole.MOMENTUM, allocate)
        self.variance = _reserve(parameter, TensorRole.VARIANCE, allocate)

    def bind(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Make ``optimizer.state[parameter]`` refer to this memory, with torch's keys.

        An empty `state` starts at zero. A tensor that someone else put there is copied in and replaced by ours.

        Raises:
            ConfigError: the parameter has meanwhile got another shape.
            UnsupportedError: the parameter is no longer dense.
        """
        if self.momentum.stride() != parameter.stride() and not same_layout(self.momentum, parameter):
            self._follow_layout(parameter, state)
        if not state:
            self.step.zero_()
            state.update(step=self.step, exp_avg=self.momentum.zero_(), exp_avg_sq=self.variance.zero_())
        if state["step"] is not self.step:
            state["step"] = self.step.fill_(float(state["step"]))
        if state["exp_avg"] is not self.momentum:
            state["exp_avg"] = self.momentum.copy_(state["exp_avg"])
        if state["exp_avg_sq"] is not self.variance:
            state["exp_avg_sq"] = self.variance.copy_(state["exp_avg_sq"])

    def _follow_layout(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        """Put the elements in the parameter's new order: the model's memory format has changed."""
        if self.momentum.shape != parameter.shape:
            raise ConfigError(
                f"a parameter had shape {tuple(self.momentum.shape)} when the optimizer was made and has "
                f"{tuple(parameter.shape)} now: make a new optimizer after resizing a model"
            )
        check_parameter(parameter, f"a parameter of shape {tuple(parameter.shape)}")
        for name, key in (("momentum", "exp_avg"), ("variance", "exp_avg_sq")):
            old: torch.Tensor = getattr(self, name)
            new = laid_out_as(old, parameter)
            new.copy_(old.clone())
            if state.get(key) is old:
                state[key] = new
            setattr(self, name, new)


def _reserve(parameter: torch.Tensor, role: TensorRole, allocate: AllocateState) -> torch.Tensor:
    memory = allocate(parameter, role)
    assert memory.dtype is torch.float32 and memory.shape == parameter.shape and memory.device.type == "cpu"
    return laid_out_as(memory, parameter)
