"""The memory vocabulary: `Buffer` (bytes with a known home) and `MemoryResource` (two verbs).

[Note: Life of a Buffer]
A tensor made by `Buffer.tensor` holds a small native object (`_numa.Range`) that exports the bytes and holds the
`Buffer`; the `Buffer` holds its resource. When the last tensor dies the `Buffer` dies and hands its bytes back with
`resource.deallocate`. That may happen on any thread and inside the garbage collector, so `deallocate` must not take
a lock that user code can hold: pools only append to a deque there and drain it at the next `allocate`. Nothing is
ever closed under a living tensor: closing a resource gives back what is free and lets the rest follow by itself.
"""

import mmap
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lightning_cxl.native._numa import Mapping, Range


@dataclass(frozen=True, slots=True)
class Span:
    """A sub-range of a buffer and the memory that was asked for it."""

    tier: str
    node_id: int
    offset: int
    nbytes: int


class MemoryResource(Protocol):
    """Something that owns or adapts byte-addressable memory."""

    def allocate(self, nbytes: int, *, alignment: int = mmap.PAGESIZE) -> "Buffer":
        """Return a buffer of exactly `nbytes` bytes (contents undefined)."""

    def deallocate(self, buffer: "Buffer") -> None:
        """Take the bytes of a dying buffer back. See [Note: Life of a Buffer]."""


class Buffer:
    """One contiguous range of host memory and its spans.

    Args:
        spans: which tier and node holds which sub-range, in order, covering ``[0, nbytes)``.
        parent: the buffer or mapping these bytes were cut from; kept alive.
    """

    __slots__ = ("__weakref__", "address", "nbytes", "parent", "resource", "spans")

    def __init__(
        self, address: int, nbytes: int, spans: tuple[Span, ...], resource: MemoryResource | None, parent: object = None
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.spans = spans
        self.resource = resource
        self.parent = parent

    def __del__(self, _finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Hand the bytes back to the resource they came from; while the interpreter ends, leave that to the OS."""
        resource = getattr(self, "resource", None)
        if resource is not None and not _finalizing():
            resource.deallocate(self)

    def slice(self, offset: int, nbytes: int) -> "Buffer":
        """Return a view of ``[offset, offset + nbytes)`` that keeps this buffer alive and owns nothing itself."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"slice [{offset}, {offset + nbytes}) is outside a buffer of {self.nbytes} bytes")
        return Buffer(self.address + offset, nbytes, cut_spans(self.spans, offset, nbytes), None, self)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor over the first bytes of this buffer, sharing memory and keeping it alive."""
        num_elements = 1
        for size in shape:
            num_elements *= size
        needed = num_elements * dtype.itemsize
        if needed > self.nbytes:
            raise ValueError(
                f"a tensor of shape {tuple(shape)} and {dtype} needs {needed} bytes, the buffer has {self.nbytes}"
            )
        if num_elements == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(Range(self.address, needed, self), dtype=dtype, count=num_elements).view(tuple(shape))


def cut_spans(spans: Sequence[Span], offset: int, nbytes: int) -> tuple[Span, ...]:
    """Return the spans of ``[offset, offset + nbytes)``, with offsets relative to its start."""
    cut = []
    for index in range(max(0, bisect_right(spans, offset, key=_span_offset) - 1), len(spans)):
        span = spans[index]
        begin, end = max(span.offset, offset), min(span.offset + span.nbytes, offset + nbytes)
        if begin >= end:
            break
        cut.append(Span(span.tier, span.node_id, begin - offset, end - begin))
    return tuple(cut)


def _span_offset(span: Span) -> int:
    return span.offset


# ----------------------------------------------------------------------------------------------------
# `pages_of_file`: a file's pages as memory, which takes none.


def pages_of_file(fd: int, nbytes: int) -> Buffer:
    """Return a buffer that shows a file; what is written to it becomes memory of this process, and never the file's.

    The file may be larger than memory: the kernel is not asked to keep memory for writes, which it would refuse then
    (``torch.from_file`` does ask). The buffer stays valid when the file is closed.
    """
    mapping = Mapping(nbytes, inherit=True)
    mapping.show(0, mapping.nbytes, fd, 0)
    return Buffer(mapping.address, nbytes, (), None, mapping)
