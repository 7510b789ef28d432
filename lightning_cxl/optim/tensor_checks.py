"""Which tensors the kernels take: host memory without gaps, all in the order of the parameter.

A parameter with gaps is updated in a dense copy, and what belongs to it is in row-major order.
"""

import torch

from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.memory.host_tensors import is_dense, laid_out_as
from lightning_cxl.optim.number_formats import GRAD_FORMATS

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


def check_parameter(parameter: torch.Tensor, name: str) -> None:
    """Check that `parameter` can be updated.

    Raises:
        ConfigError: neither float32 nor bfloat16, not on the host, lazily negated, or its memory was taken away.
        UnsupportedError: elements share memory with each other.
    """
    if parameter.dtype not in WEIGHT_DTYPES or parameter.device.type != "cpu":
        raise ConfigError(
            f"CPUAdam updates float32 and bfloat16 weights on the host; {name} is {parameter.dtype} on "
            f"{parameter.device}. Give it float32 master weights on the host and the others as `compute_weights`"
        )
    if parameter.layout is not torch.strided or _overlaps(parameter):
        raise UnsupportedError(
            f"elements of {name} (shape {tuple(parameter.shape)}, strides {tuple(parameter.stride())}) share memory: "
            "make it a parameter of its own with `.clone()`, or set `cpu_adam=False`"
        )
    if parameter.is_neg():
        raise ConfigError(
            f"{name} is a lazily negated view: its memory has the opposite sign, and an update in place would go the "
            "wrong way. Give it memory of its own with `.data = .data.resolve_neg()`"
        )
    _check_memory(parameter, name)


def _check_memory(tensor: torch.Tensor, what: str) -> None:
    """Check that the storage still holds every element: it may have been resized under the tensor."""
    if tensor.numel() == 0:
        return
    last = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    needed_bytes, held_bytes = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
    if needed_bytes > held_bytes:
        raise ConfigError(
            f"{what} (shape {tuple(tensor.shape)}) reaches to byte {needed_bytes} of its storage, which has "
            f"{held_bytes} bytes now: it was resized. Give the memory back before the step"
        )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether two elements may have the same address (an expanded tensor's do)."""
    reach = 0  # how far the dimensions so far go, in elements
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def same_layout(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether element i in memory of `tensor` is element i in memory of the dense `parameter`."""
    if tensor.stride() == parameter.stride():
        return tensor.shape == parameter.shape
    # the stride of a dimension of size 1 means nothing
    return tensor.shape == parameter.shape and all(
        size == 1 or own == other
        for size, own, other in zip(parameter.shape, tensor.stride(), parameter.stride(), strict=True)
    )


def follows(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether the dense `tensor` is in the order of `parameter`; row-major where that has gaps."""
    return same_layout(tensor, parameter) or (
        tensor.shape == parameter.shape and tensor.is_contiguous() and not is_dense(parameter)
    )


def is_flat_like(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether `tensor` is on the host and its memory has the elements in the order of `parameter`."""
    ordinary = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg()
    return ordinary and follows(tensor, parameter) and (tensor.is_contiguous() or is_dense(tensor))


def usable_gradient(grad: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Return a gradient as dense host memory in the order of `parameter`; a copy only where needed.

    Raises:
        UnsupportedError: it is sparse.
        ConfigError: it is on another device, or its memory was taken away.
    """
    if grad.layout is not torch.strided:
        raise UnsupportedError(
            f"the gradient of {name} is sparse ({grad.layout}): use `sparse=False` in the embedding, or "
            "`cpu_adam=False` with torch.optim.SparseAdam"
        )
    if grad.device.type != "cpu":
        raise ConfigError(f"the gradient of {name} is on {grad.device}: copy it to the host before the step")
    _check_memory(grad, f"the gradient of {name}")
    if grad.dtype in GRAD_FORMATS and is_flat_like(grad, parameter):
        return grad
    dtype = grad.dtype if grad.dtype in GRAD_FORMATS else torch.float32
    return laid_out_as(torch.empty(parameter.numel(), dtype=dtype), parameter).copy_(grad)


def check_compute_weights(compute: torch.Tensor | None, parameter: torch.Tensor, name: str) -> None:
    """Check that the kernel can write 16-bit `compute` weights, if there are some, beside the float32 `parameter`.

    Raises:
        ConfigError: it cannot.
    """
    if compute is None:
        return
    is_half = compute.dtype in (torch.bfloat16, torch.float16)
    if not (is_half and parameter.dtype is torch.float32 and is_flat_like(compute, parameter)):
        strides = parameter.stride() if is_dense(parameter) else "of a contiguous tensor"
        raise ConfigError(
            f"the compute weights of {name} must be bfloat16 or float16 on the host with shape "
            f"{tuple(parameter.shape)} and strides {strides}, "
            f"got {compute.dtype} on {compute.device} with shape {tuple(compute.shape)} and strides {compute.stride()}"
        )
    _check_memory(compute, f"the compute weights of {name}")
