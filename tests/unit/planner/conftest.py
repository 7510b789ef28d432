"""No test of the planner sees what was measured on this machine."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of caches: empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LIGHTNING_CXL_CACHE", str(folder))
    return folder
