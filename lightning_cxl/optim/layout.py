"""Tensors that a kernel can walk as one flat span: dense host memory, all in the order of the parameter."""

import torch

from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.optim.host_tensors import is_dense


def check_parameter(parameter: torch.Tensor, name: str) -> None:
    """Check that the kernel can update `parameter` in place.

    Raises:
        ConfigError: not float32, or not on the host.
        UnsupportedError: its elements do not fill one dense range of memory.
    """
    if parameter.dtype is not torch.float32 or parameter.device.type != "cpu":
        raise ConfigError(
            f"CPUAdam updates float32 weights on the host; {name} is {parameter.dtype} on {parameter.device}. "
            "Give it float32 master weights on the host and the low-precision ones as `compute_weights`"
        )
    if parameter.layout is not torch.strided or not is_dense(parameter):
        raise UnsupportedError(
            f"{name} (shape {tuple(parameter.shape)}, strides {tuple(parameter.stride())}) is not one dense range of "
            "memory: make it a parameter of its own with `.clone()`, or set `cpu_adam=False`"
        )


def same_layout(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether element i in memory of `tensor` is element i in memory of the dense `parameter`."""
    if tensor.stride() == parameter.stride():
        return tensor.shape == parameter.shape
    # the stride of a dimension of size 1 means nothing
    return tensor.shape == parameter.shape and all(
        size == 1 or own == other
        for size, own, other in zip(parameter.shape, tensor.stride(), parameter.stride(), strict=True)
    )


def laid_out_as(storage: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the memory of the dense `storage` as a tensor with the shape and strides of `parameter`."""
    if storage.stride() == parameter.stride():
        return storage
    return storage.as_strided(parameter.shape, parameter.stride())


def is_flat_like(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether `tensor` is on the host and its memory has the elements in the order of the dense `parameter`."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg() and same_layout(tensor, parameter)


def is_usable(grad: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether the kernel can read `grad` as it is."""
    return grad.dtype is torch.float32 and is_flat_like(grad, parameter)


def usable_gradient(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Return the gradient as dense float32 host memory in the order of `parameter`; a copy only where needed.

    Raises:
        UnsupportedError: it is sparse.
        ConfigError: it is on another device.
    """
    grad = parameter.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise UnsupportedError(
            f"the gradient of {name} is sparse ({grad.layout}): use `sparse=False` in the embedding, or "
            "`cpu_adam=False` with torch.optim.SparseAdam"
        )
    if grad.device.type != "cpu":
        raise ConfigError(f"the gradient of {name} is on {grad.device}: copy it to the host before the step")
    if is_usable(grad, parameter):
        return grad
    return torch.empty_like(parameter).copy_(grad)
