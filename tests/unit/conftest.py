"""Machines to read: reduced copies of what real 2- and 3-node guests show under /sys and /proc, free to be edited."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

_FIXTURES = Path(__file__).parents[1] / "fixtures" / "sysfs"


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """Return ``machine("3node", {"proc/x": "text", "proc/y": None})``: a copy with files written or removed."""

    def make(name: str, files: dict[str, str | None] | None = None) -> Path:
        root = tmp_path / name
        shutil.copytree(_FIXTURES / name, root)
        for path, text in (files or {}).items():
            if text is None:
                (root / path).unlink()
            else:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(text)
        return root

    return make
