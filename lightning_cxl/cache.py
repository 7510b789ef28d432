"""The folder of our caches: texts, tokenizers, and what was measured on this machine."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of our caches: environment variable LIGHTNING_CXL_CACHE, else ``~/.cache/lightning_cxl``."""
    root = os.environ.get("LIGHTNING_CXL_CACHE")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "lightning_cxl"
