"""What a weight is read from: one tensor of a file, or several that make it up."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_cxl.memory.heap import HeapTrimmer
from lightning_cxl.weights.chunks import Staging, scratch
from lightning_cxl.weights.header import TensorEntry
from lightning_cxl.weights.tensor_file import TensorFile


class WeightSource(Protocol):
    """Gives the values of one weight."""

    @property
    def name(self) -> str:
        """In the files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values it gives."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the values it gives."""

    def read_into(self, target: Tensor, staging: Staging) -> None:
        """Fill a tensor of the same shape; see `TensorFile.read_into`."""

    def parts(self, num_elements: int) -> Iterator[Tensor]:
        """Yield the values in row-major order, flat and a part at a time; see `TensorFile.parts`."""

    def mapped(self) -> Tensor | None:
        """Return a tensor that shows the pages of a file; None where it must be read. See `TensorFile.mapped`."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor has the bits that `read_into` would give it."""


Translate = Callable[[Sequence[WeightSource]], list[tuple[str, WeightSource]]]
"""Returns for the tensors of files, in their order, the model's names and what is read for them."""


class FileTensor(NamedTuple):
    """One tensor of a file."""

    file: TensorFile
    entry: TensorEntry

    @property
    def name(self) -> str:
        """In the file."""
        return self.entry.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        """In the file."""
        return self.entry.dtype

    def read_into(self, target: Tensor, staging: Staging) -> None:
        """Fill a tensor of the same shape; see `TensorFile.read_into`."""
        self.file.read_into(self.name, target, staging)

    def parts(self, num_elements: int) -> Iterator[Tensor]:
        """Yield the values, flat and a part at a time; see `TensorFile.parts`."""
        return self.file.parts(self.name, num_elements)

    def mapped(self) -> Tensor | None:
        """Return a tensor that shows the pages of the file; see `TensorFile.mapped`."""
        return self.file.mapped(self.name)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor has the bits that `read_into` would give it."""
        return self.file.holds(self.name, tensor)


def tensors_of(files: Iterable[TensorFile]) -> list[WeightSource]:
    """Return every tensor of files, in their order."""
    return [FileTensor(file, entry) for file in files for entry in file.entries.values()]


def values_of(source: WeightSource) -> Tensor:
    """Return the values in memory of their own."""
    values = scratch(source.shape, source.dtype)
    source.read_into(values, Staging())
    return values


class MergedTensor:
    """A weight that is computed from several tensors of files, which are in memory while that is done.

    Args:
        sources: the tensors.
        compute: from tensors like `sources`, which may be on the meta device; empties the list, to free them early.

    Raises:
        Exception: what `compute` raises when the sources do not fit together.
    """

    def __init__(self, sources: Sequence[WeightSource], compute: Callable[[list[Tensor]], Tensor]) -> None:
        self._sources = sources
        self._compute = compute
        like = compute([torch.empty(source.shape, dtype=source.dtype, device="meta") for source in sources])
        self.name = sources[0].name
        self.shape = tuple(like.shape)
        self.dtype = like.dtype

    def read_into(self, target: Tensor, staging: Staging) -> None:
        """Fill a tensor of the same shape."""
        with torch.no_grad():
            target.copy_(self._merged(staging))
        HeapTrimmer().trim_now()  # what `compute` took on the way

    def parts(self, num_elements: int) -> Iterator[Tensor]:
        """Yield the values, flat and a part at a time; all of them are in memory meanwhile."""
        yield from torch.split(self._merged(Staging()).reshape(-1), num_elements)

    def mapped(self) -> None:
        """Return None: no file has these numbers."""

    def from_pages(self) -> Callable[[], Tensor] | None:
        """Return what computes the values, also when the files are closed; None where these cannot be mapped."""
        pages = [source.mapped() for source in self._sources]
        parts = [each for each in pages if each is not None]
        return (lambda: self._compute(list(parts))) if len(parts) == len(pages) else None

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor has the numbers that `read_into` would give it."""
        return torch.equal(self._merged(Staging()).to(tensor.dtype), tensor.detach().cpu())

    def _merged(self, staging: Staging) -> Tensor:
        parts = []
        for source in self._sources:
            parts.append(scratch(source.shape, source.dtype))
            source.read_into(parts[-1], staging)
        return self._compute(parts)


def reader_of(source: WeightSource) -> Callable[[], Tensor] | None:
    """Return what gives the values of a weight also when its files are closed; None where they cannot be mapped."""
    if isinstance(source, MergedTensor):
        return source.from_pages()
    pages = source.mapped()
    return None if pages is None else lambda: pages
