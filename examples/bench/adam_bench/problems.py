"""What is updated: parameters of a given size and shape, allocated once, touched, and shared by all contenders."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lightning_cxl.machine.topology import Topology
from lightning_cxl.text import format_bytes

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_ALIGN = 64
# stays free for everything else
_RESERVE_BYTES = 1 << 30
_PATTERN = 1 << 16


@dataclass(frozen=True)
class Layout:
    """How many parameters, in which tensors."""

    label: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes)


def parse_count(text: str) -> int:
    """Return a number of parameters written as ``"1M"``, ``"1.5G"`` or ``"4096"``.

    Raises:
        ValueError: not such a number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    if match is None or not float(match[1]):
        raise ValueError(f"cannot read {text!r} as a number of parameters: write 4096, 500K, 20M or 1.5G")
    return int(float(match[1]) * _FACTORS[match[2]])


def format_count(count: int) -> str:
    """Return a number of parameters as it is written in tables: ``"20M"``."""
    for suffix, factor in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= factor:
            return f"{count / factor:.4g}{suffix}"
    return str(count)


def one_tensor(count: int) -> Layout:
    """Return `count` parameters in one flat tensor."""
    return Layout(format_count(count), ((count,),))


def fits(nbytes: int, what: str) -> bool:
    """Return whether so much memory can be taken now; print a line when not."""
    available = Topology.detect().host_available_bytes()
    if nbytes + _RESERVE_BYTES <= available:
        return True
    print(
        f"skipped: {what} needs {format_bytes(nbytes)} and {format_bytes(_RESERVE_BYTES)} to spare, "
        f"{format_bytes(available)} are available"
    )
    return False


def filled(layout: Layout, dtype: torch.dtype, scale: float, *, positive: bool = False) -> list[torch.Tensor]:
    """Return one touched tensor per shape, pieces of one range that each start on a cache line.

    Values are normally distributed around 0 with standard deviation `scale`: they and their squares are far from
    denormals, which would make some CPUs slow.
    """
    sizes = [math.prod(shape) for shape in layout.shapes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGN) * _ALIGN)
    everything = torch.empty(starts[-1], dtype=dtype)
    pattern = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0)) * scale
    pattern = (pattern.abs() if positive else pattern).to(dtype)
    for start in range(0, starts[-1], _PATTERN):
        piece = everything[start : start + _PATTERN]
        piece.copy_(pattern[: piece.numel()])
    return [
        everything[start : start + size].view(shape)
        for start, size, shape in zip(starts, sizes, layout.shapes, strict=False)
    ]


@dataclass
class Problem:
    """Parameters with gradients, and momentum and variance for optimizers that take what they are given."""

    layout: Layout
    parameters: list[torch.nn.Parameter]
    gradients: list[torch.Tensor]
    momentum: list[torch.Tensor]
    variance: list[torch.Tensor]

    def __post_init__(self) -> None:
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient

    @classmethod
    def make(cls, layout: Layout, dtype: torch.dtype = torch.float32) -> "Problem":
        """Allocate a problem; `dtype` is that of parameters and gradients, the rest is float32."""
        return cls(
            layout,
            parameters=[torch.nn.Parameter(tensor) for tensor in filled(layout, dtype, 0.02)],
            gradients=filled(layout, dtype, 0.01),
            momentum=filled(layout, torch.float32, 0.01),
            variance=filled(layout, torch.float32, 1e-4, positive=True),
        )

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return self.layout.numel

    def states(self) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
        """Yield momentum and variance of each parameter under torch's names."""
        for parameter, momentum, variance in zip(self.parameters, self.momentum, self.variance, strict=True):
            yield parameter, {"exp_avg": momentum, "exp_avg_sq": variance}
