"""What `DeviceEngine` promises beyond the contract of all engines: which memory it holds, and what copies wait for."""

import contextlib
import threading
import time

import pytest
import torch

from lightning_cxl.devices import make_engine
from tests import apart, training_device
from tests.fakes import RecyclingMemory

NUMEL = 1 << 12


@pytest.fixture
def engine(on_device):
    if on_device.type == "cpu":
        pytest.skip("needs a device apart")
    engine = make_engine(on_device)
    yield engine
    engine.close()


@pytest.fixture
def needs_apart():
    if training_device.chosen.type != "apart":
        pytest.skip("streams can be paused, and copies watched, on the device apart only")


def on_host():
    return torch.zeros(NUMEL).pin_memory()


def paused_copies(engine):
    """Copies to the host do not begin inside, where that can be had."""
    return apart.paused(engine._d2h_stream) if training_device.chosen.type == "apart" else contextlib.nullcontext()


def another_stream(engine):
    """Return a stream that is none of the engine's: after 32 streams of a process the first ones come again."""
    while (stream := torch.Stream(engine.device)) in (engine._h2d_stream, engine._d2h_stream):
        pass
    return stream


@pytest.mark.usefixtures("needs_apart")
def test_autograd_does_not_add_into_a_gradient_that_is_being_copied(engine):
    """The gradient of `p` is a view of that of `x`, to which autograd adds in place where nobody else has it."""
    x = torch.zeros(1, NUMEL, device=engine.device, requires_grad=True) * 1.0
    p = torch.ones(NUMEL, device=engine.device, requires_grad=True)
    landed, transfers = on_host(), []

    def take(p):
        grad, p.grad = p.grad, None
        transfers.append(engine.d2h(grad, landed))

    p.register_post_accumulate_grad_hook(take)
    later = x * 3.0  # made first, so that its gradient comes last
    loss = ((x + p.unsqueeze(0)) * 2.0).sum() + later.sum()
    apart.set_delay(d2h=0.05)
    loss.backward()
    transfers[0].wait_host()
    assert torch.equal(landed, torch.full((NUMEL,), 2.0))


def test_the_memory_of_a_dropped_source_is_free_once_the_device_has_waited_in_the_stream_that_made_it(engine):
    with paused_copies(engine):
        transfer = engine.d2h(torch.ones(NUMEL, device=engine.device), on_host(), from_here=True)
        held = torch.accelerator.memory_allocated(engine.device)
        with another_stream(engine):
            transfer.wait()
        assert torch.accelerator.memory_allocated(engine.device) == held
        transfer.wait()
        assert torch.accelerator.memory_allocated(engine.device) < held


@pytest.mark.usefixtures("needs_apart")
def test_a_source_of_another_stream_keeps_its_memory_until_the_copy_is_done(engine):
    """FSDP2 with a replicated mesh: the hook's stream starts the copy and waits, and the allocating one goes on."""
    landed, maker, hook = on_host(), another_stream(engine), another_stream(engine)
    held = torch.accelerator.memory_allocated(engine.device)
    with maker:
        gradient = torch.full((NUMEL,), 1.0, device=engine.device)
    hook.wait_stream(maker)
    with paused_copies(engine), hook:
        transfer = engine.d2h(gradient, landed)
        del gradient
        transfer.wait()
        with maker:
            following = torch.full((NUMEL,), 7.0, device=engine.device)
        maker.synchronize()
    transfer.wait_host()
    assert landed.eq(1).all() and following.eq(7).all()
    engine.synchronize()
    with maker:
        assert torch.accelerator.memory_allocated(engine.device) == held + following.nbytes  # it is free now


@pytest.mark.usefixtures("needs_apart")
def test_host_memory_that_is_dropped_is_not_used_again_before_its_copy_is_done(engine):
    memory = RecyclingMemory()
    apart.set_delay(h2d=0.02, d2h=0.02)
    slot = torch.zeros(NUMEL, device=engine.device)
    for number in range(3):
        source = memory.allocate(4 * NUMEL, "unit").tensor((NUMEL,), torch.float32).fill_(number)
        transfer = engine.h2d(source, slot)
        del source
        assert memory.live_bytes == 4 * NUMEL
        transfer.wait()
        assert slot.sum().item() == number * NUMEL
        engine.synchronize()
        assert memory.live_bytes == 0
    engine.d2h(slot, memory.allocate(4 * NUMEL, "unit").tensor((NUMEL,), torch.float32))
    assert memory.live_bytes == 4 * NUMEL
    engine.synchronize()
    assert memory.live_bytes == 0


@pytest.mark.usefixtures("needs_apart")
def test_a_copy_waits_for_what_the_device_computes_but_with_after_for_that_alone(engine):
    slot, source = torch.zeros(NUMEL, device=engine.device), torch.ones(NUMEL).pin_memory()
    users = engine.mark()
    users.wait_host()
    with apart.paused(torch.accelerator.current_stream(engine.device)):
        unrelated = torch.zeros(NUMEL, device=engine.device)  # queued, and stays so
        transfer = engine.h2d(source, slot, after=[users])
        transfer.wait_host()
        behind = engine.d2h(slot, on_host())
        assert not engine.mark().done() and not behind.done()
    behind.wait_host()
    assert unrelated.sum().item() == 0.0
    assert slot.sum().item() == NUMEL


@pytest.mark.usefixtures("needs_apart")
def test_pageable_memory_is_copied_beside_what_the_device_computes(engine):
    slot = torch.zeros(NUMEL, device=engine.device)
    users = engine.mark()
    users.wait_host()
    with apart.paused(torch.accelerator.current_stream(engine.device)):
        source = torch.ones(NUMEL)
        transfer = engine.h2d(source, slot, after=[users])
        source.fill_(7.0)  # it was staged
        transfer.wait_host()
    assert slot.sum().item() == NUMEL
    back = torch.empty(NUMEL)
    engine.d2h(slot, back).wait_host()
    assert torch.equal(back, torch.ones(NUMEL))


@pytest.mark.usefixtures("needs_apart")
def test_two_threads_that_copy_at_once_keep_their_own_streams(engine):
    """What was current before a copy is each thread's own. Copies to pageable memory block, so that threads meet."""
    outcome = []
    sources = [torch.zeros(NUMEL, device=engine.device) for _ in range(2)]

    def copy(source, stream):
        with stream:
            engine.d2h(source, torch.empty(NUMEL))
            outcome.append(torch.accelerator.current_stream(engine.device) == stream)

    threads = [threading.Thread(target=copy, args=(source, torch.Stream(engine.device))) for source in sources]
    with apart.paused(engine._d2h_stream):
        for thread in threads:
            thread.start()
        time.sleep(0.2)  # both are in the middle of their copies
    for thread in threads:
        thread.join()
    assert outcome == [True, True]


def test_a_thread_takes_the_device_of_the_engine(on_device):
    if torch.accelerator.device_count() < 2 or on_device.type == "cpu":
        pytest.skip("needs two devices")
    engine = make_engine(torch.device(on_device.type, 1))
    seen = []
    thread = threading.Thread(
        target=lambda: (engine.use_in_this_thread(), seen.append(torch.accelerator.current_device_index()))
    )
    thread.start(), thread.join()
    assert seen == [1]
    assert torch.accelerator.current_device_index() == 0
