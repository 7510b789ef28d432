"""`saved_generation`: to which generation of state on SSD a checkpoint file refers, read without the types in it."""

import os
import pickle
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

KEY = "lightning_cxl"
"""Of our entry in a checkpoint."""
SSD = "ssd"
"""In our entry, where the checkpoint refers to state on SSD: ``folders`` and ``generation``."""


def saved_generation(path: str | os.PathLike[str], folders: Sequence[str]) -> int | None:
    """Return the number of the generation to which a checkpoint file refers.

    Neither tensors nor classes of the file are loaded, and no code that it names runs: a user's own types are no
    obstacle.

    Args:
        path: of a local file.
        folders: of the store that has the generation.

    Returns:
        None: there is no such file, it cannot be read, or it refers to nothing in these folders.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = [each for each in archive.namelist() if fnmatch(each, "*/data.pkl")]
            with archive.open(name) as file:
                saved = _Unpickler(file).load()[KEY][SSD]
        return int(saved["generation"]) if saved["folders"] == list(folders) else None
    except Exception:  # whatever a damaged file makes of the unpickler
        return None


class _Anything(dict[Any, Any]):
    """Stands for an object of any class: has the entries of a mapping, and takes everything else without effect."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __call__(self, *args: object) -> "_Anything":
        return _Anything()

    def __setstate__(self, state: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass

    def extend(self, items: object) -> None:
        pass

    def add(self, item: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Anything

    def persistent_load(self, pid: Any) -> Any:
        return None
