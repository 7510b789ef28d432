"""Machines to read, reduced copies of what real 2- and 3-node guests show under /sys and /proc, free to be edited.

No test sees what was measured on this machine, nor its devices where speeds are looked up.
"""

import shutil
from pathlib import Path

import pytest

from lightning_cxl.commands import env as environment
from lightning_cxl.machine import speeds

_FIXTURES = Path(__file__).parents[1] / "fixtures" / "sysfs"


@pytest.fixture
def machine(tmp_path):
    """Return ``machine("3node", {"proc/x": "text", "proc/y": None})``: a copy with files written or removed."""

    def make(name, files=None):
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


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LIGHTNING_CXL_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch):
    for module in (environment, speeds):
        monkeypatch.setattr(module, "devices_apart", lambda: ())
