"""Devices with memory of their own, played by the CPU: for tests that are about streaming and always need one."""

import pytest

from lightning_cxl import runtime
from tests.fakes import DelayingEngine, ReorderingEngine


def delaying(_device):
    return DelayingEngine(0.0005, computes_on_host=False)


def reordering(_device):
    return ReorderingEngine(3, 0.0005, computes_on_host=False)


@pytest.fixture(params=[delaying, reordering])
def device_apart(request, monkeypatch):
    """Let every run of the test use such a device: first one that is late, then one whose copies overtake."""
    monkeypatch.setattr(runtime, "make_engine", request.param)
