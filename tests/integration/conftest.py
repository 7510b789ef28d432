"""These tests train on the device that `tests/training_device.py` chooses, but for those marked ``on_cpu``.

Their models are tiny: without the first fixture none of their activations would be worth a move.
"""

import signal
import threading
import time

import pytest
import torch

from lightning_cxl.optim.cpu_adam import AdamStep
from lightning_cxl.run.run import Run
from lightning_cxl.storage.store import Store
from tests import training_device


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
def device_apart(_device):
    if training_device.current.type == "cpu":
        pytest.skip("needs a device apart")


@pytest.fixture(scope="module")
def kernels_of_bitsandbytes():
    """Those without a GPU are compiled by torch, which does not know the device apart; their tables stay there."""
    bnb = pytest.importorskip("bitsandbytes")
    with torch._dynamo.config.patch(disable=True):
        if training_device.unavailable is None:
            for kind in ("nf4", "fp4"):
                layer = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type=kind).to("cpu")
                layer.to(training_device.chosen)(torch.zeros(1, 64, device=training_device.chosen))
        yield


def before_updates(monkeypatch, act):
    """Call a function before each update that runs behind."""
    apply = AdamStep.apply

    def acts_first(step, work, scale):
        if threading.current_thread() is not threading.main_thread():
            act()
        apply(step, work, scale)

    monkeypatch.setattr(AdamStep, "apply", acts_first)


@pytest.fixture
def slow_updates(monkeypatch):
    """Let every update of a unit take longer than the device's work."""
    before_updates(monkeypatch, lambda: time.sleep(0.01))


class Gate:
    """Holds every update on the worker until it is opened."""

    def __init__(self, monkeypatch):
        self.is_open, self.num_waiting = threading.Event(), 0
        before_updates(monkeypatch, self._wait)

    def _wait(self):
        self.num_waiting += 1
        assert self.is_open.wait(30), "nobody opened the gate: the step waits for its updates"

    def open_when_one_waits(self):
        deadline = time.monotonic() + 30
        while not self.num_waiting and time.monotonic() < deadline:
            time.sleep(1e-3)
        self.is_open.set()


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


@pytest.fixture
def written(monkeypatch):
    """A list that gets the name of every record that is written."""
    names, write = [], Store.write

    def noted(store, record, memory):
        names.append(record.name)
        return write(store, record, memory)

    monkeypatch.setattr(Store, "write", noted)
    return names
