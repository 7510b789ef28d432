"""Versions of tensors: torch counts writes in place."""

import torch


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's version counter; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def stale_error(what: str, version: int | None, expected: int | None) -> RuntimeError:
    """Return the error for a tensor that changed between forward and recompute; autograd has the same."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {version}, the forward saw version {expected}. Run backward before changing it, or change a clone."
    )


def version_only(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor that has the version of `tensor` now and later, and keeps none of its memory."""
    watch = tensor.detach()  # shares the version counter, and keeps it when its data is replaced
    watch.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return watch
