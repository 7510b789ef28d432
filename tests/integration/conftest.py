"""The models of these tests are tiny: without this, none of their activations would be worth a move.

With ``--engine delaying`` or ``--engine reordering`` the CPU plays a device with memory of its own, whose copies are
late or finish in another order, and whose memory is poisoned when it is let go: the same tests then look for races.
"""

import threading
import time

import pytest

from lightning_cxl import runtime
from lightning_cxl.optim.adam_step import AdamStep
from tests.fakes import make_autograd_see_another_device
from tests.integration.devices import delaying, reordering


@pytest.fixture(autouse=True)
def _offload_small_activations(monkeypatch):
    monkeypatch.setattr(runtime.OffloadRuntime, "min_activation_bytes", 1)


@pytest.fixture(autouse=True)
def _engine(request, monkeypatch):
    name = request.config.getoption("--engine")
    if name != "host":
        monkeypatch.setattr(runtime, "make_engine", {"delaying": delaying, "reordering": reordering}[name])
        if request.node.get_closest_marker("weights_stay"):
            pytest.skip("weights that stream move to memory of their units")
        if not request.node.get_closest_marker("exact_repeats"):
            make_autograd_see_another_device(monkeypatch)


@pytest.fixture
def slow_updates(monkeypatch):
    """Let every update of a unit take longer than the device's work."""
    apply = AdamStep.apply

    def late(step, work, scale):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.01)
        apply(step, work, scale)

    monkeypatch.setattr(AdamStep, "apply", late)
