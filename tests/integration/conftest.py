"""These tests train on the device that `tests/training_device.py` chooses, but for those marked ``on_cpu``.

Their models are tiny: without the first fixture none of their activations would be worth a move.
"""

import signal
import threading
import time

import pytest

from lightning_cxl.optim.cpu_adam import AdamStep
from lightning_cxl.run.run import Run


@pytest.fixture(autouse=True)
def _offload_small_activations(monkeypatch):
    monkeypatch.setattr(Run, "min_activation_bytes", 1)


@pytest.fixture(autouse=True)
def _device(request):
    if not request.node.get_closest_marker("on_cpu"):
        request.getfixturevalue("on_device")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)  # after an exception Lightning's stays, and holds the Trainer


@pytest.fixture
def slow_updates(monkeypatch):
    """Let every update of a unit take longer than the device's work."""
    apply = AdamStep.apply

    def late(step, work, scale):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.01)
        apply(step, work, scale)

    monkeypatch.setattr(AdamStep, "apply", late)
