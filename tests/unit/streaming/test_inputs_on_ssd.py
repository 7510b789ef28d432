"""Inputs of units on SSD: right values at the recompute, a hard cap of memory, and nothing left of dropped graphs."""

import gc
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from lightning_cxl.devices.transfer import HostEngine
from lightning_cxl.errors import StorageError
from lightning_cxl.storage.drive import System
from lightning_cxl.storage.store import Area, Store
from lightning_cxl.storage.swap import BufferPool, Swapper
from lightning_cxl.streaming.activations import ActivationOffload
from lightning_cxl.streaming.on_ssd import NUM_INPUT_SLOTS, InputsOnSsd
from lightning_cxl.streaming.units import find_units
from tests.storage_cases import BLOCK, Gate, data_file, memory_of

FEATURES = 64
NUM_BLOCKS = 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))


class Rig:
    """A net whose inputs lie on SSD, and one whose inputs lie in memory."""

    def __init__(self, folder, engine, memory, num_buffers=2.0):
        self.gate = Gate()
        self.allocated = []
        self.folder = folder
        self.store = Store([folder], budget_bytes=1 << 24, system=self.gate)
        self.area = Area(self.store, "inputs", 0, 1)
        pool = BufferPool(self.allocate, int(num_buffers * 2 * BLOCK))
        swapper = Swapper(self.store, pool, begin_thread=engine.use_in_this_thread)
        self.inputs = InputsOnSsd(swapper, self.area, engine)
        self.engine = engine
        self.offload = self.attached(ActivationOffload(engine, memory.allocate, min_bytes=1, place_on_ssd=self.place))

    def attached(self, offload):
        self.net = Net().to(self.engine.device)
        offload.attach(find_units(self.net))
        return offload

    def allocate(self, nbytes):
        self.allocated.append(nbytes)
        return memory_of(nbytes)

    def place(self, nbytes, _unit):
        return self.inputs.place(nbytes)

    def loss(self, seed=0):
        device = self.engine.device
        x = torch.randn(16, FEATURES, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(device)
        x = self.net.stem(x)
        for block in self.net.blocks:
            x = block(x)
        return x.square().mean()

    def grads(self, seed=0, loss=None):
        self.net.zero_grad()
        (self.loss(seed) if loss is None else loss).backward()
        return [parameter.grad.cpu().clone() for parameter in self.net.parameters()]

    def expected(self, seed=0):
        self.offload.detach()
        found = self.grads(seed)
        self.offload.attach(find_units(self.net))
        return found

    def on_drive(self):
        return data_file(self.folder).read_bytes()

    def close(self):
        self.gate.is_open.set()
        self.offload.detach()
        self.net.cpu()
        self.inputs.close()
        self.store.close()


@pytest.fixture(params=[0.0, 0.5, 1.0, 4.0], ids=lambda number: f"{number} buffers")
def rig(tmp_path, engine, memory, request):
    made = Rig(tmp_path, engine, memory, request.param)
    yield made
    made.close()


@pytest.fixture
def two(tmp_path, engine, memory):
    made = Rig(tmp_path, engine, memory)
    yield made
    made.close()


@pytest.fixture
def on_host(tmp_path, memory):
    made = Rig(tmp_path, HostEngine(), memory)
    yield made
    made.close()


def assert_same(ours, theirs):
    assert all(map(torch.equal, ours, theirs))


def test_gradients_are_those_of_inputs_in_memory(rig):
    for seed in range(3):
        assert_same(rig.grads(seed), rig.expected(seed))
    # the device's last unit needs no image, which may be gone before its write begins
    assert 3 * (NUM_BLOCKS - 1) <= rig.store.stats()["num_writes"] <= 3 * NUM_BLOCKS


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_a_forward_that_outruns_the_drive_takes_no_more_memory(two, memory, seconds):
    two.gate.write_seconds = seconds
    for seed in range(3):
        assert_same(two.grads(seed), two.expected(seed))
    assert two.allocated == [4 * BLOCK]
    assert memory.requests == []


def test_where_sizes_are_not_known_the_first_input_says_how_large_buffers_are(tmp_path, memory):
    rig = Rig(tmp_path, HostEngine(), memory, num_buffers=0)
    assert_same(rig.grads(), rig.expected())
    assert rig.allocated == [NUM_INPUT_SLOTS * BLOCK]
    rig.close()


def test_a_late_write_is_not_overtaken_by_a_read(tmp_path, engine, memory):
    rig = Rig(tmp_path, engine, memory, num_buffers=2 * NUM_BLOCKS)
    expected = [rig.expected(seed) for seed in range(2)]
    assert_same(rig.grads(0), expected[0])  # the places have bytes of another step
    rig.gate.is_open.clear()
    loss = rig.loss(1)
    threading.Timer(0.05, rig.gate.is_open.set).start()
    assert_same(rig.grads(loss=loss), expected[1])
    rig.close()


def test_a_buffer_that_is_being_written_gets_no_other_image(on_host, monkeypatch):
    goes_on, held = threading.Event(), []

    def first_waits(fd, views, offset):
        if not held:
            held.append(offset)
            assert goes_on.wait(20)
        return System.pwritev(fd, views, offset)

    monkeypatch.setattr(on_host.gate, "pwritev", first_waits)
    values = [torch.full((1024,), float(index)) for index in range(2)]  # two buffers, of two blocks each
    places = [on_host.place(2 * BLOCK, "unit") for _ in values]
    for place, value in zip(places, values, strict=True):
        place.store(value, 1024)
        assert place.write_has_begun.wait(20)
    found = [torch.zeros(2048) for _ in values]
    second = places[1].fetch(found[1])
    time.sleep(0.05)
    goes_on.set()
    second.wait_host()
    places[0].fetch(found[0]).wait_host()
    assert all(torch.equal(image[1024:], value) for image, value in zip(found, values, strict=True))


def test_the_next_input_is_read_while_a_unit_is_recomputed(two, monkeypatch):
    read, seen = [], []
    original = Store.read

    def noted(store, record, memory, **options):
        read.append(record.versions[0])
        return original(store, record, memory, **options)

    loss = two.loss()
    two.engine.synchronize()
    wait_until_written(two, NUM_BLOCKS)
    monkeypatch.setattr(Store, "read", noted)
    last_is_near = not two.engine.computes_on_host
    expected = [*range(2 - last_is_near, NUM_BLOCKS + 1 - last_is_near), NUM_BLOCKS - last_is_near]

    def note(*_):
        deadline_s = time.monotonic() + 10
        while len(read) < expected[len(seen)] and time.monotonic() < deadline_s:
            time.sleep(0.001)
        seen.append(len(read))

    for block in two.net.blocks:
        block.up.register_forward_pre_hook(note)
    two.grads(loss=loss)
    assert seen == expected


def wait_until_written(rig, num_writes):
    deadline_s = time.monotonic() + 10
    while rig.store.stats()["num_writes"] < num_writes and time.monotonic() < deadline_s:
        time.sleep(0.001)
    rig.store.wait()


@pytest.mark.parametrize("what", ["read", "write"])
def test_an_error_is_raised_by_the_recompute_and_the_next_step_is_right(two, what):
    expected = two.expected(1)
    for _ in range(3):
        two.gate.fails = what
        loss = two.loss()
        with pytest.raises(StorageError, match=f"cannot {what}") as caught:
            two.grads(loss=loss)
        assert caught.value.errno == 5
        two.gate.fails = None
        del loss, caught
        assert_same(two.grads(1), expected)


def test_an_error_of_a_write_that_nobody_reads_is_nobodys(two):
    two.gate.fails = "write"
    loss = two.loss()
    del loss
    gc.collect()
    two.gate.fails = None
    two.inputs.close()
    two.store.close()


def test_a_retained_graph_is_read_again(two):
    expected = two.expected()
    loss = two.loss()
    for _ in range(3):
        two.net.zero_grad()
        loss.backward(retain_graph=True)
        assert_same([parameter.grad.cpu() for parameter in two.net.parameters()], expected)


def test_graphs_that_are_dropped_leave_their_places(two):
    for seed in range(6):
        losses = [two.loss(seed), two.loss(seed)]
        reserved = two.store.stats()["reserved_bytes"]
        del losses
    assert two.store.stats()["reserved_bytes"] == reserved <= 2 * NUM_BLOCKS * 2 * BLOCK
    two.engine.synchronize()
    for seed in range(3):
        two.grads(seed)
    assert two.store.stats()["reserved_bytes"] == reserved


def test_an_image_that_nobody_holds_any_more_is_not_written(on_host, monkeypatch):
    on_host.net.blocks[1].register_forward_pre_hook(fail)
    goes_on, d2h = threading.Event(), HostEngine.d2h

    class Late:
        """A copy that is not done when its graph has been dropped."""

        def wait(self):
            pass

        def done(self):
            return goes_on.is_set()

        def wait_host(self):
            assert goes_on.wait(20)

    def late(engine, source, destination, *, after=None, from_here=False):
        d2h(engine, source, destination, after=after)
        return Late()

    monkeypatch.setattr(HostEngine, "d2h", late)
    with pytest.raises(ArithmeticError):
        on_host.loss()
    gc.collect()
    goes_on.set()
    on_host.inputs.close()
    assert on_host.store.stats()["num_writes"] == 0


def fail(*_args, **_options):
    raise ArithmeticError("inside")


def test_a_copy_that_cannot_be_started_leaves_nothing_behind(on_host, monkeypatch):
    expected = on_host.expected()
    with monkeypatch.context() as patched:
        patched.setattr(HostEngine, "d2h", fail)
        for _ in range(5):  # more often than there are buffers
            with pytest.raises(ArithmeticError):
                on_host.loss()
    assert_same(on_host.grads(), expected)


def test_a_copy_that_fails_later_is_an_error_of_whoever_reads(on_host, monkeypatch):
    class Failed:
        def wait(self):
            pass

        def done(self):
            return True

        wait_host = fail

    with monkeypatch.context() as patched:
        patched.setattr(HostEngine, "d2h", lambda *_args, **_options: Failed())
        loss = on_host.loss()
    with pytest.raises(StorageError, match="nothing was written to it"):
        loss.backward()


def test_a_backward_after_the_run_is_refused(two):
    loss = two.loss()
    two.inputs.close()
    with pytest.raises(StorageError, match="the run that had it there is over"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_that_it_has_no_thread(on_host):
    image = on_host.place(BLOCK, "unit")
    with on_host.inputs._lock:  # as another thread may have it at that moment
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            del image
            try:
                on_host.place(BLOCK, "unit")
                os._exit(5)
            except StorageError as error:
                os._exit(3 if "forked" in str(error) else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
