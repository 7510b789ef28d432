"""Inputs of units on SSD: right values at the recompute, a hard cap of memory, and nothing left of dropped graphs."""

import gc
import threading
import time
from contextlib import closing

import pytest
import torch

from lightning_cxl.devices import HostEngine
from lightning_cxl.errors import StorageError
from lightning_cxl.storage.drive import System
from lightning_cxl.storage.store import Area, Store
from lightning_cxl.storage.swap import BufferPool, Swapper
from lightning_cxl.streaming.activations import ActivationOffload
from lightning_cxl.streaming.on_ssd import NUM_INPUT_SLOTS, InputsOnSsd
from lightning_cxl.streaming.units import find_units
from tests.storage_cases import BLOCK, Gate, eventually, memory_of
from tests.unit.memory.host import ends_in_child
from tests.unit.streaming.test_activations_lifetime import FEATURES, Net

NUM_BLOCKS = 5


class Rig:
    def __init__(self, folder, engine, memory, num_buffers=2.0):
        self.gate = Gate()
        self.allocated = []
        self.store = Store([folder], budget_bytes=1 << 24, system=self.gate)
        self.area = Area(self.store, "inputs", 0, 1)
        pool = BufferPool(self.allocate, int(num_buffers * 2 * BLOCK))
        self.inputs = InputsOnSsd(Swapper(self.store, pool, begin_thread=engine.use_in_this_thread), self.area, engine)
        self.engine, self.net = engine, Net(NUM_BLOCKS).to(engine.device)
        self.place = lambda nbytes, unit: self.inputs.place(nbytes)
        self.offload = ActivationOffload(engine, memory.allocate, min_bytes=1, place_on_ssd=self.place)
        self.offload.attach(find_units(self.net))

    def allocate(self, nbytes):
        self.allocated.append(nbytes)
        return memory_of(nbytes)

    def loss(self, seed=0):
        x = torch.randn(16, FEATURES, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
        return self.net(x.to(self.engine.device))

    def grads(self, seed=0, loss=None):
        self.net.zero_grad()
        (self.loss(seed) if loss is None else loss).backward()
        return [parameter.grad.cpu().clone() for parameter in self.net.parameters()]

    def assert_right(self, seed=0):
        assert all(map(torch.equal, self.grads(seed), self.expected(seed)))

    def expected(self, seed=0):
        self.offload.detach()
        found = self.grads(seed)
        self.offload.attach(find_units(self.net))
        return found

    def close(self):
        self.gate.is_open.set()
        self.offload.detach()
        self.net.cpu()
        self.inputs.close()
        self.store.close()


@pytest.fixture
def rig(tmp_path, engine, memory, request):
    with closing(Rig(tmp_path, engine, memory, getattr(request, "param", 2.0))) as made:
        yield made


@pytest.fixture
def on_host(tmp_path, memory):
    with closing(Rig(tmp_path, HostEngine(), memory)) as made:
        yield made


@pytest.mark.parametrize(("rig", "slots"), [(0.0, NUM_INPUT_SLOTS), (0.5, 1), (1.0, 2), (4.0, 8)], indirect=["rig"])
def test_gradients_are_those_of_inputs_in_memory_and_a_slow_drive_takes_no_more_memory(rig, memory, slots):
    for seed in range(4):
        rig.gate.write_seconds = 0.01 * (seed == 3)
        rig.assert_right(seed)
    # the device's last unit needs no image, which may be gone before its write begins
    assert 4 * (NUM_BLOCKS - 1) <= rig.store.stats()["num_writes"] <= 4 * NUM_BLOCKS
    assert rig.allocated == [slots * BLOCK] and memory.requests == []


def test_a_buffer_that_is_being_written_gets_no_other_image(on_host, monkeypatch):
    goes_on, held = threading.Event(), []

    def first_waits(fd, views, offset):
        if not held:
            held.append(offset)
            assert goes_on.wait(20)
        return System.pwritev(fd, views, offset)

    monkeypatch.setattr(on_host.gate, "pwritev", first_waits)
    values = [torch.full((1024,), float(index)) for index in range(2)]  # two buffers, of two blocks each
    places = [on_host.inputs.place(2 * BLOCK) for _ in values]
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


def test_the_next_input_is_read_while_a_unit_is_recomputed(rig, monkeypatch):
    read, seen = [], []
    original = Store.read

    def noted(store, record, memory, **options):
        read.append(record.versions[0])
        return original(store, record, memory, **options)

    loss = rig.loss()
    rig.engine.synchronize()
    eventually(lambda: rig.store.stats()["num_writes"] >= NUM_BLOCKS)
    rig.store.wait()
    monkeypatch.setattr(Store, "read", noted)
    last_is_near = not rig.engine.computes_on_host
    expected = [*range(2 - last_is_near, NUM_BLOCKS + 1 - last_is_near), NUM_BLOCKS - last_is_near]

    def note(*_):
        eventually(lambda: len(read) >= expected[len(seen)])
        seen.append(len(read))

    for block in rig.net.blocks:
        block.up.register_forward_pre_hook(note)
    rig.grads(loss=loss)
    assert seen == expected


@pytest.mark.parametrize("what", ["read", "write"])
def test_an_error_is_raised_by_the_recompute_and_the_next_step_is_right(rig, what):
    for _ in range(3):
        rig.gate.fails = what
        loss = rig.loss()
        with pytest.raises(StorageError, match=f"cannot {what}") as caught:
            rig.grads(loss=loss)
        assert caught.value.errno == 5
        rig.gate.fails = None
        del loss, caught
        rig.assert_right(1)


def test_an_error_of_a_write_that_nobody_reads_is_nobodys(rig):
    rig.gate.fails = "write"
    rig.loss()
    gc.collect()
    rig.gate.fails = None
    rig.inputs.close()
    rig.store.close()


def test_a_retained_graph_is_read_again(rig):
    expected = rig.expected()
    loss = rig.loss()
    for _ in range(3):
        rig.net.zero_grad()
        loss.backward(retain_graph=True)
        assert all(torch.equal(p.grad.cpu(), other) for p, other in zip(rig.net.parameters(), expected, strict=True))


def test_graphs_that_are_dropped_leave_their_places(rig):
    for seed in range(6):
        losses = [rig.loss(seed), rig.loss(seed)]
        reserved = rig.store.stats()["reserved_bytes"]
        del losses
    assert rig.store.stats()["reserved_bytes"] == reserved <= 2 * NUM_BLOCKS * 2 * BLOCK
    rig.engine.synchronize()
    for seed in range(3):
        rig.grads(seed)
    assert rig.store.stats()["reserved_bytes"] == reserved


class CopyLike:
    """A copy to the host that is done when it can be waited for."""

    def __init__(self, wait_host, done=lambda: True):
        self.wait_host, self.done, self.wait = wait_host, done, lambda: None


def fail(*_args, **_options):
    raise ArithmeticError("inside")


def test_an_image_that_nobody_holds_any_more_is_not_written(on_host, monkeypatch):
    on_host.net.blocks[1].register_forward_pre_hook(fail)
    goes_on = threading.Event()  # when its graph has been dropped
    late = CopyLike(lambda: goes_on.wait(20), goes_on.is_set)
    monkeypatch.setattr(HostEngine, "d2h", lambda *_args, **_options: late)
    with pytest.raises(ArithmeticError):
        on_host.loss()
    gc.collect()
    goes_on.set()
    on_host.inputs.close()
    assert on_host.store.stats()["num_writes"] == 0


def test_an_image_is_read_behind_a_write_that_has_not_begun(on_host, monkeypatch):
    goes_on, d2h = threading.Event(), HostEngine.d2h

    def late(engine, source, destination, **options):
        d2h(engine, source, destination, **options)
        return CopyLike(lambda: goes_on.wait(20), goes_on.is_set)

    monkeypatch.setattr(HostEngine, "d2h", late)
    image, into = on_host.inputs.place(2 * BLOCK), torch.zeros(2048)
    image.store(torch.full((1024,), 7.0), 1024)
    fetch = image.fetch(into)
    time.sleep(0.05)
    goes_on.set()
    fetch.wait_host()
    assert into[1024:].eq(7).all()


def test_a_copy_that_cannot_be_started_leaves_nothing_behind(on_host, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(HostEngine, "d2h", fail)
        for _ in range(5):  # more often than there are buffers
            with pytest.raises(ArithmeticError):
                on_host.loss()
    on_host.assert_right()


def test_a_copy_that_fails_later_is_an_error_of_whoever_reads(on_host, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(HostEngine, "d2h", lambda *_args, **_options: CopyLike(fail))
        loss = on_host.loss()
    with pytest.raises(StorageError, match="nothing was written to it"):
        loss.backward()


def test_a_backward_after_the_run_is_refused(rig):
    loss = rig.loss()
    rig.inputs.close()
    with pytest.raises(StorageError, match="the run that had it there is over"):
        loss.backward()


def test_a_forked_child_is_told_that_it_has_no_thread(on_host):
    images = [on_host.inputs.place(BLOCK)]

    def is_told():
        images.clear()
        with pytest.raises(StorageError, match="forked"):
            on_host.inputs.place(BLOCK)
        return True

    with on_host.inputs._lock:  # as another thread may have it at that moment
        assert ends_in_child(is_told) == 0
