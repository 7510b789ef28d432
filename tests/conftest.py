"""Shared by all tests: the device that those that train use, and one torch thread.

With more threads tiny models would spend their time in barriers.
"""

import gc
import os

import pytest
import torch

from tests import training_device

# Lightning uses what jsonargparse deprecates; a filter by the warning's class would need the package
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=training_device.NAMES,
        default="apart",
        help="where the tests that train do so; see tests/training_device.py",
    )


def pytest_configure(config):
    training_device.choose(config.getoption("--device"))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # modules and tests are no garbage: whoever collects after a test need not look through them


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def on_device():
    """The chosen device, where the test trains; at the end no race and nothing left. See [Note: Where tests train]."""
    with training_device.on_chosen() as device:
        yield device


@pytest.fixture
def late(request, on_device):
    """Makes copies or kernels late: ``@pytest.mark.parametrize("late", ["copies", "kernels"], indirect=True)``."""
    training_device.make_late(request.param)


@pytest.fixture
def late_copies(on_device):
    training_device.make_late("copies")


@pytest.fixture
def late_kernels(on_device):
    training_device.make_late("kernels")
