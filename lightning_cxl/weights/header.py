"""The header of a safetensors file: which tensors it holds, and where their bytes are.

A file is eight bytes (the header's length, little-endian), a JSON object (name -> dtype, shape, offsets) padded with
spaces, then the bytes of all tensors without gaps. A header is checked completely before a byte of data is read.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from lightning_cxl.errors import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""What the reference implementation accepts: JSON of that size takes a gigabyte of objects already."""
METADATA = "__metadata__"
_ALIGNMENT = 8
_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return the format's name of a dtype.

    Raises:
        CheckpointError: the format has none.
    """
    if dtype not in _NAMES:
        raise CheckpointError(f"safetensors files cannot hold {dtype}; they hold {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


def encode(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return length and header of a file that holds these tensors in this order."""
    content: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for name, dtype, shape in tensors:
        if name == METADATA or name in content:
            raise CheckpointError(f"cannot write two tensors named {name!r} to one safetensors file; rename one")
        end = begin + prod(shape) * dtype.itemsize
        content[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)  # so that data is aligned
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"a header of {len(text):,} bytes for {len(tensors):,} tensors is more than the {MAX_HEADER_BYTES:,} that "
            "safetensors allows: write more, smaller files"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def decode(text: bytes, data_bytes: int) -> tuple[list[TensorEntry], dict[str, str]]:
    """Return the tensors of a file in the order of their bytes, and its metadata.

    Args:
        text: the header without its length.
        data_bytes: bytes of the file behind the header.

    Raises:
        ValueError: anything that the format does not allow; the message says what, not in which file.
    """
    try:
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"its header is not JSON: {error}") from None
    if not text.startswith(b"{") or not isinstance(content, dict):
        raise ValueError("its header is not a JSON object")
    metadata = content.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"its {METADATA} is not a table of strings")
    entries = sorted((_entry(name, value) for name, value in content.items()), key=lambda e: (e.begin, e.nbytes))
    end = 0
    for entry in entries:
        if entry.begin != end:
            wrong = "overlaps the one before" if entry.begin < end else "leaves a gap"
            raise ValueError(f"tensor {entry.name!r} begins at byte {entry.begin:,} of the data, not {end:,}: {wrong}")
        end += entry.nbytes
    if end != data_bytes:
        wrong = "the file is cut off" if end > data_bytes else "the rest belongs to no tensor"
        raise ValueError(f"its tensors take {end:,} bytes, behind the header are {data_bytes:,}: {wrong}")
    return entries, metadata


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"its header names {twice!r} twice")
    return table


def _entry(name: str, value: Any) -> TensorEntry:
    """Return the checked entry of one tensor."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} has not dtype, shape and data_offsets, but {str(value)[:100]}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"tensor {name!r} has the dtype {dtype!r}; this version reads {', '.join(_DTYPES)}")
    if not _are_sizes(shape):
        raise ValueError(f"tensor {name!r} has the shape {shape!r}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise ValueError(f"tensor {name!r} has the data_offsets {offsets!r}")
    entry = TensorEntry(name, _DTYPES[dtype], tuple(shape), offsets[0])
    if entry.nbytes != offsets[1] - offsets[0]:
        raise ValueError(
            f"tensor {name!r} of shape {shape} and {dtype} takes {entry.nbytes:,} bytes, but its data_offsets "
            f"{offsets} span {offsets[1] - offsets[0]:,}"
        )
    return entry


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
