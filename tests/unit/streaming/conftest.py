import pytest

from lightning_cxl.streaming.activations import ActivationOffload
from lightning_cxl.transfer.engine import HostEngine
from tests.fakes import DelayingEngine, RecyclingMemory, ReorderingEngine


@pytest.fixture
def memory():
    return RecyclingMemory()


@pytest.fixture(params=["host", "late", "late-device", "reordering"])
def engine(request):
    """The CPU's engine; one that is late; one that is late, or out of order, for a device with memory of its own."""
    if request.param == "host":
        engine = HostEngine()
    elif request.param == "reordering":
        engine = ReorderingEngine(seed=5, computes_on_host=False)
    else:
        engine = DelayingEngine(computes_on_host=request.param == "late")
    yield engine
    engine.close()


@pytest.fixture
def offload(engine, memory):
    """Stores every input that carries gradient, however small."""
    offload = ActivationOffload(engine, memory.allocate, min_bytes=1)
    yield offload
    offload.detach()
