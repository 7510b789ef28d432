"""Each test finds the device as new and leaves it so: no races seen, no memory kept."""

import gc
import time

import pytest
import torch

from tests import apart


def pytest_collection_finish(session):
    """Build before the first test, whose time is limited."""
    if not session.config.option.collectonly and not apart.why_unavailable():
        apart.build.library()


@pytest.fixture(autouse=True)
def _clean():
    if why := apart.why_unavailable():
        pytest.skip(why)
    apart.load()
    before = _usage()
    yield
    apart.synchronize()
    seen = apart.clear_violations()
    apart.reset()
    assert not seen, "\n".join(seen)
    if _usage() != before:
        gc.collect()  # a cycle may hold it, as a traceback does
    patience = time.monotonic() + 5
    while _usage() != before and time.monotonic() < patience:
        time.sleep(0.01)  # autograd's thread drops what it holds of a backward a moment after the caller goes on
    assert _usage() == before, "memory that is not given back"


def _usage():
    return [torch.apart.memory_allocated(index) for index in range(torch.apart.device_count())], apart.host_usage()


@pytest.fixture
def side():
    """A stream beside the default one."""
    return torch.Stream(device="apart")
