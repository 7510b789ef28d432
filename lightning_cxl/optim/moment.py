"""`Moment`: momentum or variance of one parameter, in float32, bfloat16 or 8 bit, in memory that stays where it is."""

from collections.abc import Callable

import torch

from lightning_cxl.memory.host_tensors import is_dense, laid_out_as
from lightning_cxl.optim.eight_bit import decode, encode, flattened, num_blocks
from lightning_cxl.optim.number_formats import StatePrecision
from lightning_cxl.optim.state_visits import At
from lightning_cxl.placement.placement import TensorRole

AllocateState = Callable[[torch.Tensor, TensorRole, torch.dtype, int], torch.Tensor]
"""Returns a 1-D host tensor for a parameter's optimizer state: of that role, dtype and number of elements."""

_DTYPES: dict[StatePrecision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}


def allocate_from_torch(parameter: torch.Tensor, role: TensorRole, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return memory from torch's own allocator, whatever the parameter and role."""
    return torch.empty(numel, dtype=dtype)


def choose_precision(parameter: torch.Tensor, wanted: StatePrecision, *, sensitive: bool) -> StatePrecision:
    """Return how the moments of `parameter` are kept.

    Under 4,096 elements there is little to save, and among them are norms and biases, which are sensitive (the rule of
    bitsandbytes). A stochastically rounded moment needs no scale to share, so `sensitive` matters in 8 bit only.
    """
    small = parameter.numel() < 4096 or not is_dense(parameter)
    return "fp32" if small or (sensitive and wanted == "8bit") else wanted


def moment_bytes(numel: int, precision: StatePrecision) -> int:
    """Return the bytes of one moment."""
    scales = 4 * num_blocks(numel) if precision == "8bit" else 0
    return numel * _DTYPES[precision].itemsize + scales


class Moment:
    """One of Adam's two moments of one parameter.

    Args:
        parameter: whose element order in memory it follows.
        role: MOMENTUM or VARIANCE.
        precision: how it is kept; 8 bit has a code per element and a float32 scale per block of 256 in memory order.
        allocate: gives the memory, which is held from now on.
    """

    __slots__ = ("scales", "unsigned", "values")

    def __init__(
        self, parameter: torch.Tensor, role: TensorRole, precision: StatePrecision, allocate: AllocateState
    ) -> None:
        numel = parameter.numel()
        self.unsigned = role is TensorRole.VARIANCE
        self.scales = None
        if precision == "8bit":
            self.scales = allocate(parameter, role, torch.float32, num_blocks(numel))
        self.values = laid_out_as(allocate(parameter, role, _DTYPES[precision], numel), parameter)

    @property
    def flat(self) -> torch.Tensor:
        """The memory of `values` as one dimension."""
        return flattened(self.values)

    def zero_(self, at: At = flattened) -> None:
        """Set every element to zero.

        Args:
            at: where the memory is now.
        """
        at(self.values).fill_(127 if self.scales is not None and not self.unsigned else 0)
        if self.scales is not None:
            at(self.scales).zero_()

    def load(self, values: torch.Tensor, scales: torch.Tensor | None = None, at: At = flattened) -> None:
        """Take over `values` of the parameter's shape, any element order.

        Args:
            values: floating point, or uint8 codes with `scales`.
            scales: one per block, in the memory order of `values`; in row-major order where these have gaps.
            at: where the memory is now.
        """
        own, own_values = None if self.scales is None else at(self.scales), in_shape(self.values, at)
        if scales is not None:
            values = values.cpu() if is_dense(values) else values.cpu().contiguous()
        if own is not None and scales is not None and values.stride() == self.values.stride():
            own_values.copy_(values)
            own.copy_(scales)
            return
        plain = values if scales is None else decode(values, scales, unsigned=self.unsigned)
        if own is None:
            own_values.copy_(plain)
            return
        ordered = torch.empty_strided(self.values.shape, self.values.stride(), dtype=torch.float32).copy_(plain)
        encode(ordered, own_values, own, unsigned=self.unsigned)

    def follow(self, parameter: torch.Tensor, at: At = flattened) -> None:
        """Put the elements in the parameter's new order in memory, which is at `at` now."""
        old = in_shape(self.values, at)
        old_values = old.clone() if self.scales is None else decode(old, at(self.scales), unsigned=self.unsigned)
        self.values = laid_out_as(self.values, parameter)
        self.load(old_values, at=at)


def in_shape(tensor: torch.Tensor, at: At) -> torch.Tensor:
    """Return a dense tensor where its memory is now."""
    return at(tensor).as_strided(tensor.shape, tensor.stride())
