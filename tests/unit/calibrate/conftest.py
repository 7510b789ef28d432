"""No test here leaves anything in the real folder of caches."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of caches: empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LIGHTNING_CXL_CACHE", str(folder))
    return folder
