"""Short measurements that leave nothing behind."""

import pytest

from lightning_cxl.commands import calibrate
from lightning_cxl.commands.calibrate import Caches


class SmallCaches(Caches):
    """Of 1 MiB: those of a server would make buffers of gigabytes."""

    def __init__(self, cpus, root):
        super().__init__(frozenset(), root)
        self.all_bytes = self.largest_bytes = 1 << 20


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(calibrate, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "Caches", SmallCaches)


@pytest.fixture(autouse=True)
def _no_devices():
    """Here devices are looked up, those of the test."""
