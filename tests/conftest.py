"""Shared by all tests: the device that those that train use, one torch thread, and which tests run when.

With more torch threads tiny models would spend their time in barriers.

[Note: Which tests run when]
* `make test` runs files side by side, one process per CPU. It leaves out tests marked ``full``: cases of a product of
  values, each of which another case has, too; and programs that take long. `make test-all` runs them as well.
* Of tests/integration and tests/distributed `make test` runs the first case of each function, because a case takes
  seconds there; of files marked ``every_case`` all.
* Tests marked ``alone`` look at clocks, at the CPUs of threads, or at the memory of a control group. They run in one
  process, when the others are done.
* Files with slow tests start first, so that no process waits long for the last one. The files of tests/distributed run
  in one process, which keeps the ranks that they share.
* Examples of hypothesis are the same in every run of `make test`. `make test-all` tries others as well: see
  tests/hypothesis_profiles.py.
* Kernels beyond 2^31 elements (tests/numerics/test_large.py) are ``full``, too, although no other case shows the same:
  they take long.
"""

import contextlib
import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from lightning_cxl.machine import recorder, speeds
from lightning_cxl.memory.hook import active
from tests import processes, training_device

# Lightning uses what jsonargparse deprecates; a filter by the warning's class would need the package
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

DISTRIBUTED = "tests/distributed/"

with contextlib.suppress(ImportError):  # `make gpu` takes the packages that are there
    from tests import hypothesis_profiles  # noqa: F401


def pytest_addoption(parser):
    told = "where the tests that train do so; see tests/training_device.py"
    parser.addoption("--device", choices=training_device.NAMES, default="apart", help=told)


def pytest_configure(config):
    training_device.choose(config.getoption("--device"))


def pytest_ignore_collect(collection_path, config):
    """Leave out the files without such tests where those that run alone are asked for: to import them takes long."""
    if collection_path.suffix != ".py" or not config.option.markexpr.startswith("alone"):
        return None
    return "mark.alone" not in collection_path.read_text() or None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    begun = set()
    for item in items:
        if item.path.parent.name in ("integration", "distributed") and not item.get_closest_marker("full"):
            function = (item.path, item.originalname)
            if function in begun and not item.get_closest_marker("every_case"):
                item.add_marker("full")
            begun.add(function)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which `make gpu` does without
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class OneProcessForRanks(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return DISTRIBUTED if nodeid.startswith(DISTRIBUTED) else super()._split_scope(nodeid)

    return OneProcessForRanks(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # modules and tests are no garbage: whoever collects after a test need not look through them


@pytest.fixture(autouse=True, scope="session")
def _own_caches(tmp_path_factory):
    """Keep what tests kill, and speeds, out of the cache of whoever runs them, and theirs out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder, measured = tmp_path_factory.mktemp("recorder"), tmp_path_factory.mktemp("speeds")
        patch.setattr(recorder, "_folder", lambda: folder)
        patch.setattr(speeds, "cache_folder", lambda: Path(os.environ.get("LIGHTNING_CXL_CACHE", measured)))
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def storage_threads():
    return {each for each in threading.enumerate() if each.name.startswith("lightning_cxl storage")}


@pytest.fixture(autouse=True)
def _no_thread_of_a_drive_is_left():
    before = storage_threads()
    yield
    left = storage_threads() - before
    assert not left, f"the test left a store open: {left}"


@pytest.fixture(autouse=True)
def _no_run_is_left():
    """Memory of a run that goes on would be what later tests use."""
    before = active()
    yield
    for _ in range(3):  # what has a finaliser of its own goes one round later
        if active() not in (before, None):
            gc.collect()
            training_device.close_loops()
    assert active() in (before, None), "the test has left a run that goes on"


@pytest.fixture(autouse=True)
def _libraries_begin_anew():
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)  # Lightning hands the last seed on to processes, which begin with it
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    processes.forget_libraries()


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
