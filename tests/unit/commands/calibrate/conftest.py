"""Short measurements that leave nothing behind."""

import pytest

from lightning_cxl.commands import calibrate


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(calibrate, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "_BLOCK_BYTES", 1 << 20)
    # those of a server would make buffers of gigabytes
    monkeypatch.setattr(calibrate, "cache_bytes", lambda cpus, root: 1 << 20)


@pytest.fixture(autouse=True)
def _no_devices():
    """Here devices are looked up, those of the test."""
