"""`TensorFile` reads a safetensors file, `write_tensors` writes one: in chunks, from and to the tensors' own memory.

Nothing here holds more than a few chunks of `CHUNK_BYTES` beside the tensors. Read and written bytes are dropped from
the kernel's page cache, which would fill the node of the next tensors.
"""

import ctypes
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_cxl.errors import CheckpointError, UnsupportedError
from lightning_cxl.memory.host_memory import HeapTrimmer
from lightning_cxl.memory.resource import Buffer, pages_of_file
from lightning_cxl.sharding.host_shard import SHAPE_ALONE, made_like, shape_of
from lightning_cxl.text import listed
from lightning_cxl.torch_private import make_wrapper, no_torch_function, tree_leaves, tree_map, written_by

# Several processes defer the reading of weights until the model is cut, so that each reads its part alone.
#
# [Note: Deferred reading]
# Of a model that is cut, a process keeps its rows of each parameter. So where several processes have met, loading takes
# no memory for parameters; when FSDP2 cuts the model, it copies the rows of this process out of each parameter, one
# parameter after the other.
#
# * Numbers that are in the file as the model has them: the parameter is a tensor over the pages of the file. The kernel
#   has these once for all processes of a machine, and takes them back when memory is short.
# * Numbers that are converted, or computed from several tensors: an `UnreadWeight`. Views of it, so also rows, are
#   unread as well. Every other operator reads the values anew and converts them; nothing keeps them.
#
# Until then a model can be looked at, saved, wrapped and run, at the speed of the files. Pages can be written, which
# takes memory in this process. An `UnreadWeight` refuses to be written.

_CPU = torch.device("cpu")
_OTHER_NUMBERS = frozenset(
    (torch.ops.aten.view.dtype, torch.ops.aten.view_as_real.default, torch.ops.aten.view_as_complex.default)
)
"""Views that show other numbers than those they are taken of, so that they cannot come before a conversion."""


def is_reading_deferred() -> bool:
    """Return whether weights are read when the model is cut, not when it is loaded: several processes have met."""
    return dist.is_initialized() and dist.get_world_size() > 1


class UnreadWeight(Tensor):
    """A weight without memory; see [Note: Deferred reading]."""

    __slots__ = ("_read",)  # who puts another parameter in its place takes `__dict__` over
    _read: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, like: Tensor, dtype: torch.dtype, read: Callable[[], Tensor], device: torch.device = _CPU
    ) -> "UnreadWeight":
        weight: UnreadWeight = make_wrapper(cls, like.shape, strides=like.stride(), dtype=dtype, device=device)
        weight._read = read
        return weight

    def values(self) -> Tensor:
        """Return the values in memory of their own, as a plain tensor."""
        with torch.no_grad():
            read, values = self._read(), torch.empty(self.shape, dtype=self.dtype, device=self.device)
            return values.copy_(read)

    @property
    def data(self) -> Tensor:
        """The weight without autograd; what is set in its place is the values from now on, as for any tensor."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, values: Tensor) -> None:
        # of the same weight where nothing had to be converted
        read = values._read if isinstance(values, UnreadWeight) else lambda: values
        Tensor.data.__set__(self, values)  # type: ignore[attr-defined]  # its shape and dtype
        self._read = read

    def data_ptr(self) -> int:
        raise UnsupportedError(f"the memory of a weight is asked for, and {_WHY}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        values = self.values()
        copy: Tensor = (
            torch.nn.Parameter(values, self.requires_grad) if isinstance(self, torch.nn.Parameter) else values
        )
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.values()!r})"

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on the values; a view gives what is unread, too."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.as_strided.default:
            raise UnsupportedError(f"`{func}` counts from the begin of a weight's memory, and {_WHY}")
        if func.is_view and func not in _OTHER_NUMBERS:
            return _view(func, args, kwargs)
        if func in SHAPE_ALONE:
            return made_like(func, args, kwargs)
        if any(isinstance(leaf, UnreadWeight) for leaf in tree_leaves(written_by(func, args, kwargs) or [])):
            raise UnsupportedError(f"`{func}` would write a weight, and {_WHY}")
        read: dict[int, Tensor] = {}

        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, UnreadWeight):
                if id(leaf) not in read:  # each is read once
                    read[id(leaf)] = leaf.values()
                return read[id(leaf)]
            return leaf

        return func(*tree_map(value_of, args), **tree_map(value_of, kwargs))


_WHY = (
    "it is in its file: with several processes, each reads its part when the run begins. To change weights before, "
    "load with mapped=False; then every process has all of them in memory until the run begins"
)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight, *rest = args
    whole = weight._read  # a view shows the same when `.data` is set
    views = func(shape_of(weight), *rest, **kwargs)
    if isinstance(views, Tensor):
        return UnreadWeight(views, weight.dtype, lambda: func(whole(), *rest, **kwargs), weight.device)

    def read(index: int) -> Tensor:
        return func(whole(), *rest, **kwargs)[index]  # type: ignore[no-any-return]

    return [UnreadWeight(view, weight.dtype, partial(read, index), weight.device) for index, view in enumerate(views)]


# Tensors as bytes, in chunks of bounded size: what files are read into and written from.

CHUNK_BYTES = 16 * 2**20  # large enough for a disk, small enough that a few of them do not count


def chunks(tensor: torch.Tensor, num_elements: int) -> Iterator[torch.Tensor]:
    """Yield views that cover a tensor in row-major order; of a contiguous tensor they are contiguous."""
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
    """Return the memory of a tensor for which `is_raw` holds; writing to it does not count as a change for torch."""
    # through ``numpy()`` it would keep the tensor alive, and the storage could never be resized again
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def scratch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    # not from the heap: blocks of some MiB that come and go between weights leave holes there, which held another
    # quarter of a model
    nbytes = prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


class Staging:
    """Host memory that numbers pass through on their way to another dtype, layout or device."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def like(self, chunk: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return contiguous memory of a chunk's shape, the same at every call; contents undefined."""
        if self._memory is None:
            self._memory = scratch((CHUNK_BYTES,), torch.uint8)
        return self._memory[: chunk.numel() * dtype.itemsize].view(dtype).view(chunk.shape)


class WeightSource:
    """Gives the values of one weight: a base for what reads or computes them, by `values` or `read_into`."""

    name: str  # in the files
    shape: tuple[int, ...]
    dtype: torch.dtype

    def values(self, staging: "Staging | None" = None) -> Tensor:
        values = scratch(self.shape, self.dtype)
        self.read_into(values, staging or Staging())
        return values

    def read_into(self, target: Tensor, staging: "Staging") -> None:
        """Fill a tensor of the same shape, of any dtype, layout and device, and raise its version."""
        with torch.no_grad():
            target.copy_(self.values(staging))

    def parts(self, num_elements: int) -> Iterator[Tensor]:
        """Yield the values in row-major order, flat and a part at a time; a part may be overwritten by the next."""
        yield from torch.split(self.values().reshape(-1), num_elements)

    def mapped(self) -> Tensor | None:
        """Return a tensor that shows the pages of a file, also when that is closed; None where it must be read."""
        return None

    def reader(self) -> Callable[[], Tensor] | None:
        """Return what gives the values also when the files are closed; None where these cannot be mapped."""
        pages = self.mapped()
        return None if pages is None else lambda: pages

    @torch.no_grad()
    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor has the bits that `read_into` would give it."""
        rest = tensor.detach().reshape(-1)
        for part in self.parts(CHUNK_BYTES // max(self.dtype.itemsize, tensor.dtype.itemsize)):
            own, rest = rest[: len(part)].cpu().resolve_conj(), rest[len(part) :]
            if not torch.equal(own.view(torch.uint8), part.to(own.dtype).view(torch.uint8)):
                return False
        return True


Translate = Callable[[Sequence[WeightSource]], list[tuple[str, WeightSource]]]
"""Returns for the tensors of files, in their order, the model's names and what is read for them."""


@dataclass(frozen=True, slots=True)
class FileTensor(WeightSource):
    file: "TensorFile"
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # first byte in the file

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @torch.no_grad()
    def read_into(self, target: Tensor, staging: "Staging") -> None:
        try:
            if is_raw(target) and target.dtype == self.dtype:
                memory = bytes_of(target)
                for begin in range(0, len(memory), CHUNK_BYTES):
                    self.file.read(memory[begin : begin + CHUNK_BYTES], self.begin + begin)
            else:
                offset, whole = self.begin, target.detach()
                for chunk in chunks(whole, CHUNK_BYTES // max(self.dtype.itemsize, target.dtype.itemsize)):
                    part = staging.like(chunk, self.dtype)
                    self.file.read(bytes_of(part), offset)
                    offset += part.nbytes
                    chunk.copy_(part)
        finally:
            torch.autograd.graph.increment_version(target)

    def parts(self, num_elements: int) -> Iterator[Tensor]:
        count = prod(self.shape)
        memory = scratch((min(num_elements, count),), self.dtype)
        for begin in range(0, count, num_elements):
            part = memory[: count - begin]
            self.file.read(bytes_of(part), self.begin + begin * self.dtype.itemsize)
            yield part

    def mapped(self) -> Tensor | None:
        if self.begin % self.dtype.itemsize:  # not aligned
            return None
        return self.file.pages().tensor(self.shape, self.dtype, self.begin)


class MergedTensor(WeightSource):
    """A weight that is computed from several tensors of files, which are in memory while that is done.

    `compute` is called with tensors on the meta device, too; it empties the list that it gets, to free them early.
    """

    def __init__(self, sources: Sequence[WeightSource], compute: Callable[[list[Tensor]], Tensor]) -> None:
        self._sources = sources
        self._compute = compute
        like = compute([torch.empty(source.shape, dtype=source.dtype, device="meta") for source in sources])
        self.name, self.shape, self.dtype = sources[0].name, tuple(like.shape), like.dtype

    def values(self, staging: "Staging | None" = None) -> Tensor:
        return self._compute([source.values(staging) for source in self._sources])

    def read_into(self, target: Tensor, staging: "Staging") -> None:
        super().read_into(target, staging)
        HeapTrimmer().trim_now()  # what `compute` took on the way

    def reader(self) -> Callable[[], Tensor] | None:
        pages = [source.mapped() for source in self._sources]
        parts = [each for each in pages if each is not None]
        return (lambda: self._compute(list(parts))) if len(parts) == len(pages) else None


# Safetensors files.
#
# A file is eight bytes (the header's length, little-endian), a JSON object (name -> dtype, shape, offsets) padded with
# spaces, then the bytes of all tensors without gaps.

_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the reference implementation: JSON of that size takes a gigabyte of objects already."""
_METADATA = "__metadata__"
_ALIGNMENT = 8
_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    **{
        f"{kind}{bits}": getattr(torch, f"{name}{bits}")
        for kind, name in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"F8_{kind}": getattr(torch, f"float8_{kind.lower()}") for kind in ("E4M3FNUZ", "E5M2", "E5M2FNUZ")},
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._pages: Buffer | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            # the package checks the header and the size of the file; numpy's way maps it without memory for writes
            with safe_open(f"/proc/self/fd/{self._fd}", "numpy") as checked:
                self.metadata: dict[str, str] = checked.metadata() or {}
            length = int.from_bytes(os.pread(self._fd, _LENGTH_BYTES, 0), "little")
            header = json.loads(os.pread(self._fd, length, _LENGTH_BYTES))
            header.pop(_METADATA, None)
            found, begin = [], _LENGTH_BYTES + length
            for name, entry in header.items():
                if entry["dtype"] not in _DTYPES:
                    known = ", ".join(_DTYPES)
                    raise ValueError(f"tensor {name!r} has the dtype {entry['dtype']!r}; this version reads {known}")
                start = begin + entry["data_offsets"][0]
                found.append(FileTensor(self, name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start))
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, (OSError, ValueError, SafetensorError)):
                raise self._unreadable(error) from error
            raise
        self.entries = {each.name: each for each in sorted(found, key=lambda each: (each.begin, each.nbytes))}
        """By name, in the order of their bytes."""

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # with the pages that two chunks shared
            os.close(fd)

    def pages(self) -> Buffer:
        if self._pages is None:
            try:
                self._pages = pages_of_file(self._fd, os.fstat(self._fd).st_size)
            except OSError as error:
                raise self._unreadable(error) from error
        return self._pages

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill memory from an offset in the file, which does not stay in the page cache."""
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

    def _unreadable(self, error: Exception) -> CheckpointError:
        if isinstance(error, OSError):
            return CheckpointError(f"cannot read `{self.path}`: {error.strerror or error}.")
        return CheckpointError(f"cannot read `{self.path}`: {error}. Download or save it again.")


def encode_header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for name, dtype, shape in tensors:
        if name == _METADATA or name in content:
            raise CheckpointError(f"cannot write two tensors named {name!r} to one safetensors file; rename one")
        if dtype not in _NAMES:
            raise CheckpointError(f"safetensors files cannot hold {dtype}; they hold {', '.join(map(str, _NAMES))}")
        end = begin + prod(shape) * dtype.itemsize
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)  # so that data is aligned
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"a header of {len(text):,} bytes for {len(tensors):,} tensors is more than the {MAX_HEADER_BYTES:,} that "
            "safetensors allows: write more, smaller files"
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class NamedTensor(NamedTuple):
    name: str
    tensor: torch.Tensor  # with its values, or on the meta device where `read` has them
    dtype: torch.dtype
    read: Callable[[], torch.Tensor] | None = None
    """Returns the values when they are written, so that they take memory only then."""

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


@torch.no_grad()
def write_tensors(path: Path, tensors: Sequence[NamedTensor], metadata: Mapping[str, str]) -> None:
    # wide elements first, as the reference implementation writes: every tensor is then aligned to its elements
    ordered = sorted(tensors, key=lambda item: -item.dtype.itemsize)
    start = encode_header([(name, dtype, tuple(tensor.shape)) for name, tensor, dtype, _ in ordered], metadata)
    staging = Staging()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write(fd, memoryview(start))
        for _, tensor, dtype, read in ordered:
            values = tensor if read is None else read()
            for chunk in chunks(values, CHUNK_BYTES // max(dtype.itemsize, values.dtype.itemsize)):
                is_plain = is_raw(chunk) and chunk.dtype == dtype
                _write(fd, bytes_of(chunk if is_plain else staging.like(chunk, dtype).copy_(chunk)))
            del values, chunk  # what was made for this tensor goes before the next
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _write(fd: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        done += os.write(fd, memory[done : done + CHUNK_BYTES])


Source = str | PathLike[str] | Sequence[str | PathLike[str]]
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@contextmanager
def open_weights(source: Source) -> Iterator[list[TensorFile]]:
    paths, index = _files_of(source)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(paths)} files with weights do not exist: {listed([*map(str, missing)])}. Complete "
            "the download, or name the files that there are."
        )
    with ExitStack() as opened:
        files = [opened.enter_context(TensorFile(path)) for path in paths]
        holder: dict[str, Path] = {}
        for file in files:
            for name in file.entries:
                if name in holder:
                    raise CheckpointError(
                        f"tensor {name!r} is in `{holder[name]}` and in `{file.path}`: they are files of different "
                        "models, or an old one was left behind. Name the right files."
                    )
                holder[name] = file.path
        for name, named in index.items():
            if name not in holder or holder[name].name != named:
                where = f"is in `{holder[name].name}`" if name in holder else "is in none of its files"
                raise CheckpointError(
                    f"the index says that tensor {name!r} is in `{named}`, but it {where}: index and files are not of "
                    "the same save. Download or save the model again."
                )
        yield files


def _files_of(source: Source) -> tuple[list[Path], dict[str, str]]:
    """Return the files, and which of them holds which tensor, where an index says so."""
    if not isinstance(source, (str, PathLike)):
        if not source:
            raise CheckpointError("an empty list of files holds no weights; name at least one")
        return [Path(fspath(path)) for path in source], {}
    path = Path(fspath(source))
    if path.is_dir():
        folder = path
        path = folder / (SINGLE_FILE if (folder / SINGLE_FILE).is_file() else INDEX_FILE)  # as transformers chooses
        if not path.is_file():
            found = sorted(
                path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth")
            )
            text = f"it has {', '.join(found[:5])}" if found else "it has no weights of any kind"
            raise CheckpointError(
                f"the folder `{folder}` has neither {SINGLE_FILE} nor {INDEX_FILE}; {text}. Name safetensors files of "
                "other names one by one; convert .bin files with `save_pretrained` of transformers."
            )
    if path.suffix != ".json":
        return [path], {}
    try:
        index = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(index, dict) or not index:
            raise ValueError("its weight_map is no table of names, or empty")
        for file in index.values():
            is_name = isinstance(file, str) and Path(file).name == file and "\\" not in file and file != ".."
            if not is_name or len(os.fsencode(file)) > 255:
                raise ValueError(f"its weight_map names {file!r}, which is not a file beside it")
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"`{path}` is not an index of safetensors files ({type(error).__name__}: {error}). Download it again."
        ) from error
    return [path.parent / name for name in dict.fromkeys(index.values())], index


def tensors_of(files: Iterable[TensorFile]) -> list[WeightSource]:
    return [tensor for file in files for tensor in file.entries.values()]
