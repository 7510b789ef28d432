"""`HostTensor`: one line of the inventory."""

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.shards import local

GRADIENTS = (TensorRole.COMPUTE_GRADS, TensorRole.MASTER_GRADS)


class HostTensor(NamedTuple):
    """A tensor that a run keeps in host memory.

    Args:
        parameter: of the model, whose weights, gradient or state it is; for weights of a unit that lie in one piece of
            memory, the first of them. None for inputs of a unit.
        role: what it is for.
        nbytes: its size.
        unit: the unit that it belongs to, where that streams or where it is the unit's input; else an empty text.
        tier: that a decorator or rule asks for; None leaves it to the policy.
        in_state: it is part of `CPUAdam`'s state: momentum, variance, or what a split master weight has beyond the
            bfloat16 weight. Only that, weights of units that stream, and inputs of units may lie on the tier `ssd`.
        is_updated: steps write it; of weights, an optimizer has to hold them.
    """

    parameter: torch.Tensor | None
    role: TensorRole
    nbytes: int
    unit: str = ""
    tier: str | None = None
    in_state: bool = False
    is_updated: bool = True

    @property
    def owner(self) -> torch.Tensor | str:
        """The parameter, or the unit whose input it is."""
        return self.unit if self.parameter is None else self.parameter

    @property
    def parameter_nbytes(self) -> int:
        """Bytes of the parameter itself, in its own type; of the shard that this process holds."""
        return 0 if self.parameter is None else local(self.parameter).nbytes


class StreamedUnit(NamedTuple):
    """A unit whose weights stream.

    Args:
        name: of the unit.
        module: the unit.
        groups: its parameters that stream, those that the same tier is asked for together. Where there is a tier
            `ssd`, those that no step writes are by themselves.
    """

    name: str
    module: nn.Module
    groups: list[list[nn.Parameter]]


def units_by_parameter(streamed: Iterable[StreamedUnit]) -> dict[int, str]:
    """Return the name of the unit of each parameter that streams, by the parameter's id."""
    return {id(parameter): unit.name for unit in streamed for group in unit.groups for parameter in group}


def grouped(parameters: Iterable[nn.Parameter], key: Callable[[nn.Parameter], Hashable]) -> list[list[nn.Parameter]]:
    """Return parameters in groups with the same key."""
    groups: dict[Hashable, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(key(parameter), []).append(parameter)
    return list(groups.values())
