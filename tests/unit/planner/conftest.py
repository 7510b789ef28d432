"""No test of the planner sees what was measured on this machine, nor the devices of this process."""

import pytest

from lightning_cxl.planner import environment, speeds


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of caches: empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LIGHTNING_CXL_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch):
    for module in (environment, speeds):
        monkeypatch.setattr(module, "devices_apart", lambda: ())
