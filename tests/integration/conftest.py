"""The models of these tests are tiny: without this, none of their activations would be worth a move."""

import pytest

from lightning_cxl.runtime import OffloadRuntime


@pytest.fixture(autouse=True)
def _offload_small_activations(monkeypatch):
    monkeypatch.setattr(OffloadRuntime, "min_activation_bytes", 1)
