"""Versions of tensors: torch counts writes in place."""

import torch


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's version counter; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def stale_error(
    what: str,
    version: int | None,
    expected: int | None,
    advice: str = "Run backward before changing it, or change a clone.",
) -> RuntimeError:
    """Return the error for a tensor that changed between forward and recompute; autograd has the same."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {version}, the forward saw version {expected}. {advice}"
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits: NaN is equal to itself, 0 is not -0."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().view(integers), other.detach().view(integers))
