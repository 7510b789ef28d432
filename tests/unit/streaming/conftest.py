"""Units run on the CPU, and on the device under test with late copies and kernels.

On the device whatever a test makes without naming a device is made there.
"""

import pytest

from lightning_cxl.devices import HostEngine, make_engine
from lightning_cxl.streaming.activations import ActivationOffload
from tests import training_device
from tests.fakes import RecyclingMemory


@pytest.fixture
def memory():
    return RecyclingMemory()


@pytest.fixture
def device_engine(on_device):
    engine = make_engine(on_device)
    with on_device:
        yield engine
    engine.close()


@pytest.fixture(params=["host", *training_device.LATE_CASES])
def engine(request):
    if request.param == "host":
        yield HostEngine()
    else:
        engine = request.getfixturevalue("device_engine")
        training_device.make_late(request.param)
        yield engine


@pytest.fixture
def offload(engine, memory):
    """Stores every input that carries gradient, however small."""
    offload = ActivationOffload(engine, memory.allocate, min_bytes=1)
    offload.memory = memory  # for the tests
    yield offload
    offload.detach()
