"""Tensors as bytes, in chunks of bounded size: what files are read into and written from."""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from math import prod

import torch

from lightning_cxl.weights.unread import UnreadWeight

CHUNK_BYTES = 16 * 2**20
"""Large enough for a disk, small enough that a few of them do not count."""


def chunks(tensor: torch.Tensor, num_elements: int) -> Iterator[torch.Tensor]:
    """Yield views that cover a tensor in row-major order, each of at most `num_elements` elements.

    Of a contiguous tensor they are contiguous.
    """
    if tensor.numel() <= num_elements:
        yield tensor
    elif tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), num_elements)
    elif (row := tensor.numel() // tensor.shape[0]) > num_elements:
        for part in tensor.unbind():
            yield from chunks(part, num_elements)
    else:
        yield from torch.split(tensor, num_elements // row)


def is_raw(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is host memory that holds its elements in row-major order and nothing else."""
    plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return tensor.is_cpu and plain and not isinstance(tensor, UnreadWeight)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor for which `is_raw` holds; writing to it does not count as a change for torch.

    It does not keep the tensor alive. Through ``numpy()`` it would, and the storage could never be resized again.
    """
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def scratch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialised memory that goes back to the kernel with the tensor.

    Not from the heap: blocks of some MiB that come and go between weights leave holes there, which held another
    quarter of a model.
    """
    nbytes = prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


class Staging:
    """`CHUNK_BYTES` of host memory that numbers pass through on their way to another dtype, layout or device."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def like(self, chunk: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return contiguous memory of a chunk's shape, the same at every call; contents undefined."""
        if self._memory is None:
            self._memory = scratch((CHUNK_BYTES,), torch.uint8)
        return self._memory[: chunk.numel() * dtype.itemsize].view(dtype).view(chunk.shape)
