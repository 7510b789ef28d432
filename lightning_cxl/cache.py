"""The folder of our caches: texts, tokenizers, and what was measured on this machine."""

import contextlib
import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of our caches: environment variable LIGHTNING_CXL_CACHE, else ``~/.cache/lightning_cxl``."""
    root = os.environ.get("LIGHTNING_CXL_CACHE")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "lightning_cxl"


def private_folder(name: str) -> Path:
    """Return a folder in the cache that nobody else may enter: it holds texts and chats. It is made if need be."""
    folder = cache_folder() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # it is somebody else's, who has let us in
        folder.chmod(0o700)
    return folder
