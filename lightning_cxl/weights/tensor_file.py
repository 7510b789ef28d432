"""`TensorFile` reads a safetensors file, `write_tensors` writes one: in chunks, from and to the tensors' own memory.

Nothing here holds more than a few chunks of `CHUNK_BYTES` beside the tensors. What was read or written is dropped from
the kernel's page cache: a cached file as large as the model fills the very node that the next tensors are to be placed
on, and pages that do not fit there go to another one.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from lightning_cxl.errors import CheckpointError
from lightning_cxl.memory.file_pages import pages_of_file
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.weights import header
from lightning_cxl.weights.chunks import CHUNK_BYTES, Staging, bytes_of, chunks, is_raw, scratch
from lightning_cxl.weights.header import TensorEntry


class TensorFile:
    """An open safetensors file whose header has been checked.

    Args:
        path: the file.

    Raises:
        CheckpointError: it cannot be read, or is not a complete safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self._data, entries, self.metadata = self._read_header()
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, (OSError, ValueError)):
                raise self._unreadable(error) from error
            raise
        self.entries: dict[str, TensorEntry] = {entry.name: entry for entry in entries}
        """By name, in the order of their bytes."""
        self._pages: Buffer | None = None

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # with the pages that two chunks shared
            os.close(fd)

    @torch.no_grad()
    def read_into(self, name: str, target: torch.Tensor, staging: Staging) -> None:
        """Fill a tensor of the same shape, of any dtype, layout and device; rounds to nearest where it must.

        Args:
            name: of the tensor in the file.
            target: INOUT. Its version is raised, also when reading fails in the middle.
            staging: used where bytes of the file are not the bytes of the target.

        Raises:
            CheckpointError: the file could not be read.
        """
        entry = self.entries[name]
        try:
            if is_raw(target) and target.dtype == entry.dtype:
                memory = bytes_of(target)
                for begin in range(0, len(memory), CHUNK_BYTES):
                    self._read(memory[begin : begin + CHUNK_BYTES], self._data + entry.begin + begin)
            else:
                for chunk, part in self._staged(entry, target.detach(), staging):
                    chunk.copy_(part)
        finally:
            torch.autograd.graph.increment_version(target)

    def parts(self, name: str, num_elements: int) -> Iterator[torch.Tensor]:
        """Yield a tensor in row-major order, flat and a part at a time; each is overwritten by the next.

        Args:
            name: of the tensor in the file.
            num_elements: of each part but the last, which may have fewer.

        Raises:
            CheckpointError: the file could not be read.
        """
        entry = self.entries[name]
        count = prod(entry.shape)
        memory = scratch((min(num_elements, count),), entry.dtype)
        for begin in range(0, count, num_elements):
            part = memory[: count - begin]
            self._read(bytes_of(part), self._data + entry.begin + begin * entry.dtype.itemsize)
            yield part

    def mapped(self, name: str) -> torch.Tensor | None:
        """Return a tensor that shows the pages of the file, and takes memory only where it is written to.

        It stays valid when the file is closed, and when its name is removed.

        Args:
            name: of the tensor in the file.

        Returns:
            A contiguous tensor; None where its bytes do not begin at a multiple of its elements' size.

        Raises:
            CheckpointError: the file could not be mapped.
        """
        entry = self.entries[name]
        begin = self._data + entry.begin
        if begin % entry.dtype.itemsize:
            return None
        if self._pages is None:
            try:
                self._pages = pages_of_file(self._fd, os.fstat(self._fd).st_size)
            except OSError as error:
                raise self._unreadable(error) from error
        return self._pages.slice(begin, entry.nbytes).tensor(entry.shape, entry.dtype)

    @torch.no_grad()
    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor has the bits that `read_into` would give it."""
        read, mine, theirs = Staging(), Staging(), Staging()
        for chunk, part in self._staged(self.entries[name], tensor.detach(), read):
            both = [staging.like(chunk, chunk.dtype) for staging in (mine, theirs)]
            both[0].copy_(chunk)
            both[1].copy_(part)
            if not torch.equal(*(flat.view(-1).view(torch.uint8) for flat in both)):
                return False
        return True

    def _staged(
        self, entry: TensorEntry, tensor: torch.Tensor, staging: Staging
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the chunks of a tensor, each with what the file has for it."""
        offset = self._data + entry.begin
        for chunk in chunks(tensor, CHUNK_BYTES // max(entry.dtype.itemsize, tensor.dtype.itemsize)):
            part = staging.like(chunk, entry.dtype)
            self._read(bytes_of(part), offset)
            offset += part.nbytes
            yield chunk, part

    def _read(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._fd, [memory[done:]], offset + done)
            except OSError as error:
                raise self._unreadable(error) from error
            if count == 0:
                raise self._unreadable(EOFError(f"it has become shorter than {offset + len(memory):,} bytes"))
            done += count
        os.posix_fadvise(self._fd, offset, done, os.POSIX_FADV_DONTNEED)

    def _read_header(self) -> tuple[int, list[TensorEntry], dict[str, str]]:
        """Return where data begins, the tensors, and the metadata."""
        size = os.fstat(self._fd).st_size
        start = os.pread(self._fd, header.LENGTH_BYTES, 0)
        length = int.from_bytes(start, "little")
        if len(start) < header.LENGTH_BYTES:
            raise ValueError(f"it has {size} bytes, too few for a safetensors file")
        if length > header.MAX_HEADER_BYTES:
            raise ValueError(
                f"its header would have {length:,} bytes, of {header.MAX_HEADER_BYTES:,} allowed: no safetensors file"
            )
        data = header.LENGTH_BYTES + length
        if data > size:
            raise ValueError(f"its header has {length:,} bytes, the file {size:,}: the file is cut off")
        entries, metadata = header.decode(os.pread(self._fd, length, header.LENGTH_BYTES), size - data)
        return data, entries, metadata

    def _unreadable(self, error: Exception) -> CheckpointError:
        if isinstance(error, OSError):
            return CheckpointError(f"cannot read `{self.path}`: {error.strerror or error}.")
        return CheckpointError(f"cannot read `{self.path}`: {error}. Download or save it again.")


class NamedTensor(NamedTuple):
    """A tensor to be written, under a name and in a dtype that may differ from its own."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.tensor.numel() * self.dtype.itemsize


def write_tensors(path: Path, tensors: Sequence[NamedTensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file and wait until it is on the disk.

    Args:
        path: is created or overwritten; left half-written on an error.
        tensors: on any device, in any layout.
        metadata: what other tools read, such as ``{"format": "pt"}``.

    Raises:
        OSError: the file system refused.
        CheckpointError: the format cannot hold these tensors.
    """
    # wide elements first, as the reference implementation writes: every tensor is then aligned to its elements
    ordered = sorted(tensors, key=lambda item: -item.dtype.itemsize)
    start = header.encode([(name, dtype, tuple(tensor.shape)) for name, tensor, dtype in ordered], metadata)
    staging = Staging()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write(fd, memoryview(start))
        for _, tensor, dtype in ordered:
            _write_tensor(fd, tensor.detach(), dtype, staging)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@torch.no_grad()
def _write_tensor(fd: int, tensor: torch.Tensor, dtype: torch.dtype, staging: Staging) -> None:
    for chunk in chunks(tensor, CHUNK_BYTES // max(dtype.itemsize, tensor.dtype.itemsize)):
        plain = is_raw(chunk) and chunk.dtype == dtype
        _write(fd, bytes_of(chunk if plain else staging.like(chunk, dtype).copy_(chunk)))


def _write(fd: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        done += os.write(fd, memory[done : done + CHUNK_BYTES])
