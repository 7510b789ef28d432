"""Ctrl-C between any two bytecodes of an update, a fetch or an input on SSD loses no buffer, and training can go on."""

import signal
import sys
from multiprocessing.pool import ThreadPool

import pytest
import torch

from lightning_cxl.devices import HostEngine
from lightning_cxl.optim.swapped_state import StateSwapper
from lightning_cxl.storage.store import Area, Store
from lightning_cxl.storage.swap import BufferPool, Swapper, uninterrupted
from lightning_cxl.streaming.on_ssd import InputsOnSsd, WeightsOnSsd
from tests.storage_cases import memory_of

NBYTES = 64 << 10
NUM_RECORDS = 3  # more than there are buffers


class Updates:
    def __init__(self, swapper):
        self.state = StateSwapper(swapper)
        self.records = [self.state.reserve(f"unit {index}", NBYTES) for index in range(NUM_RECORDS)]
        self.use()

    def use(self):
        for record in self.records:
            with self.state.use([record]):
                pass

    def close(self):
        self.state.wait()
        self.state.swapper.close()


class Weights:
    def __init__(self, swapper):
        self.weights = WeightsOnSsd(swapper, HostEngine())
        self.homes = [self.weights.reserve(f"unit {index}", NBYTES) for index in range(NUM_RECORDS)]
        for home in self.homes:
            with home.filling() as slot:
                slot.tensor((NBYTES,), torch.uint8).fill_(7)

    def use(self):
        shown = [home.buffer.tensor((NBYTES,), torch.uint8) for home in self.homes]
        into = [torch.empty(NBYTES, dtype=torch.uint8) for _ in shown]
        fetches = [h.fetch(HostEngine(), s, i, []) for h, s, i in zip(self.homes, shown, into, strict=True)]
        for fetch, found in zip(fetches, into, strict=True):
            fetch.wait()
            assert bool((found[10:] == 7).all())
        for home, tensor in zip(self.homes, shown, strict=True):
            tensor[:10] = 9
            home.begin_access()
        for home in self.homes:
            home.end_access()

    def close(self):
        self.weights.swapper.close()


class Inputs:
    def __init__(self, swapper):
        self.inputs = InputsOnSsd(swapper, Area(swapper.store, "inputs", 2 * NUM_RECORDS * NBYTES, 1), HostEngine())
        self.use()

    def use(self):
        images = [self.inputs.place(NBYTES) for _ in range(NUM_RECORDS)]
        for value, image in enumerate(images):
            image.store(torch.full((NBYTES,), value, dtype=torch.uint8), 0)
        for value, image in reversed(list(enumerate(images))):
            into = torch.empty(NBYTES, dtype=torch.uint8)
            image.fetch(into).wait()
            assert bool((into == value).all())

    def close(self):
        self.inputs.close()


def interrupted(function, at):
    """Call a function with Ctrl-C at bytecode `at` of this package; return whether it has so many."""
    count, came = 0, False

    def in_frame(frame, event, _argument):
        nonlocal count, came
        if event == "opcode":
            count += 1
            if count == at:
                came = True
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return in_frame

    def begins(frame, _event, _argument):
        name = frame.f_code.co_filename
        if "/lightning_cxl/" in name or name.endswith("contextlib.py"):
            frame.f_trace_opcodes = True
            return in_frame
        return None

    before, computes_gradients = sys.gettrace(), torch.is_grad_enabled()
    sys.settrace(begins)
    try:
        function()
    except KeyboardInterrupt:  # `suppress` would be traced, too
        pass
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(computes_gradients)  # it may have come before a `no_grad` could end
    return came


def ends(function):
    """Call a function in another thread, a daemon, so that a test fails where it would wait for ever."""
    with ThreadPool(1) as threads:
        threads.apply_async(function).get(30)


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts():
    """It is ignored in a process that a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stride", [401, pytest.param(5, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("kind", [Updates, Weights, Inputs])
def test_ctrl_c_at_any_bytecode_loses_no_buffer(tmp_path, kind, stride):
    at, came = 1, True
    while came:
        store, pool = Store([tmp_path], budget_bytes=1 << 26), BufferPool(memory_of, 5 * NBYTES // 2)
        run = kind(Swapper(store, pool))
        came = interrupted(run.use, at)
        ends(run.use)
        ends(run.close)
        assert pool.num_taken == 0, f"bytecode {at}"
        ends(store.close)
        at += stride
    assert at > stride + 1, "never interrupted"


def test_a_second_ctrl_c_ends_a_wait():
    reached = []

    @uninterrupted
    def wait():
        signal.raise_signal(signal.SIGINT)
        reached.append("the first one waits")
        signal.raise_signal(signal.SIGINT)
        reached.append("the second one does not")

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert reached == ["the first one waits"] and signal.getsignal(signal.SIGINT) is handler
