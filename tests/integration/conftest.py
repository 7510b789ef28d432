"""The models of these tests are tiny: without this, none of their activations would be worth a move.

With ``--engine delaying`` or ``--engine reordering`` the CPU plays a device with memory of its own, whose copies are
late or finish in another order, and whose memory is poisoned when it is let go: the same tests then look for races.
"""

import pytest

from lightning_cxl import runtime
from tests.fakes import DelayingEngine, ReorderingEngine, make_autograd_see_another_device


@pytest.fixture(autouse=True)
def _offload_small_activations(monkeypatch):
    monkeypatch.setattr(runtime.OffloadRuntime, "min_activation_bytes", 1)


@pytest.fixture(autouse=True)
def _engine(request, monkeypatch):
    name = request.config.getoption("--engine")
    if name != "host":
        monkeypatch.setattr(runtime, "make_engine", {"delaying": _delaying, "reordering": _reordering}[name])
        if request.node.get_closest_marker("weights_stay"):
            pytest.skip("weights that stream move to memory of their units")
        if not request.node.get_closest_marker("exact_repeats"):
            make_autograd_see_another_device(monkeypatch)


def _delaying(_device):
    return DelayingEngine(0.0005, computes_on_host=False)


def _reordering(_device):
    return ReorderingEngine(7, 0.0005, computes_on_host=False)
