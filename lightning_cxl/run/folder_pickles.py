"""Pickles in a checkpoint folder of DCP: what they hold is read, and nothing that they ask for is run.

torch reads both kinds with an unpickler that does whatever a file says: the list of tensors (``.metadata``), and each
value that is no tensor. A folder may come from somebody else, so here only classes that such a list needs are known,
and values are read as ``torch.load(..., weights_only=True)`` reads them.
"""

import io
import pickle
import re
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
_IS_DATA = re.compile(r"__\d+_\d+\.distcp").fullmatch
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("pathlib", "WindowsPath")}


class RefusedError(pickle.UnpicklingError):
    """A list of tensors asks for what no such list needs."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return PosixPath  # of where it was written, which nobody needs: also from another system
        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise RefusedError(f"its list of tensors asks for {module}.{name}, which no such list needs")


class PlainReader(FileSystemReader):
    """Reads tensors of a folder; the list of what there is once, not for every parameter.

    Args:
        path: of the folder.

    Raises:
        OSError: there is no list.
        pickle.UnpicklingError: it asks for something else than what lists have.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with open(path / ".metadata", "rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"its list of tensors is a {type(found).__name__}")
        for each in (found.storage_data or {}).values():
            if not _IS_DATA(each.relative_path):
                raise pickle.UnpicklingError(
                    f"its list of tensors names {each.relative_path!r}, no file of a checkpoint"
                )
        self.metadata: Metadata = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what is known."""
        return self.metadata


class PlainValues(DefaultLoadPlanner):
    """Reads values that are no tensors.

    Raises:
        pickle.UnpicklingError: one has an object of a class that torch does not know to be harmless.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read one value into the dict that was asked for."""
        super().load_bytes(read_item, _plain(value))


def _plain(value: io.BytesIO) -> io.BytesIO:
    torch.load(value, weights_only=True)  # refuses what is not plain, so that the planner may read it
    value.seek(0)
    return value
