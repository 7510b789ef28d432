import pytest
import torch

from tests import apart


def bytes_of(tensor):
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


@pytest.fixture
def registered():
    """Host memory that its owner has registered."""
    tensor = torch.zeros(1000)
    assert apart.host_register(*bytes_of(tensor)) == 0
    yield tensor
    torch.accelerator.synchronize()
    assert apart.host_unregister(tensor.data_ptr()) == 0


@pytest.fixture(params=["pinned", "registered"])
def host(request):
    """Memory that copies use asynchronously."""
    if request.param == "registered":
        yield request.getfixturevalue("registered")
        return
    tensor = torch.zeros(1000, pin_memory=True)
    yield tensor
    torch.accelerator.synchronize()
    tensor.set_()  # pytest keeps the tensor for a while


def test_the_host_runs_ahead_of_copies_of_pinned_memory(host, side):
    assert host.is_pinned() and host[10:].is_pinned() and not torch.zeros(4).is_pinned()
    there = torch.full((1000,), 5.0, device="apart")
    side.wait_stream(torch.accelerator.current_stream())
    with apart.paused(side):
        with side:
            host.copy_(there, non_blocking=True)
            back = host.to("apart", non_blocking=True)
        assert host.eq(0).all() and not side.query()
    side.synchronize()
    assert host.eq(5).all() and back.eq(5).all()


def test_pageable_memory_is_read_at_the_call(side):
    host = torch.ones(1000)
    with apart.paused(side):
        with side:
            there = host.to("apart", non_blocking=True)
        host.fill_(2)
    side.synchronize()
    assert there.eq(1).all()


def test_a_copy_to_pageable_memory_is_waited_for():
    apart.set_delay(d2h=0.05)
    host = torch.zeros(1000)
    host.copy_(torch.ones(1000, device="apart"), non_blocking=True)
    assert host.eq(1).all()


@pytest.mark.parametrize("to_device", [True, False])
def test_without_non_blocking_the_host_waits(host, to_device):
    apart.set_delay(h2d=0.05, d2h=0.05)
    there = torch.ones(1000, device="apart")
    there.copy_(host) if to_device else host.copy_(there)
    assert torch.accelerator.current_stream().query()
    assert there.eq(0).all() if to_device else host.eq(1).all()


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_copies_convert_and_reorder(pinned, non_blocking):
    host = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    source = host.pin_memory() if pinned else host
    for there in (torch.zeros(3, 4, dtype=torch.bfloat16, device="apart"), torch.zeros(4, 3, device="apart").t()):
        there.copy_(source, non_blocking=non_blocking)
        back = torch.zeros(4, 3, dtype=torch.float64, pin_memory=pinned).t()
        back.copy_(there, non_blocking=non_blocking)
        torch.accelerator.synchronize()
        assert torch.equal(back, host.double())


def test_codes_of_registering():
    tensor = torch.zeros(1000)
    start, size = bytes_of(tensor)
    before = apart.host_usage()  # tests before this one may have left pinned memory in torch's cache
    assert apart.host_register(start, 0) == apart.host_register(0, size) == 1
    assert apart.host_unregister(start) == 713
    assert apart.host_register(start, size) == 0
    assert apart.host_usage()[:2] == (before[0] + 1, before[1] + size)
    for there, nbytes in ((start, size), (start + 8, 8), (start - 8, 16)):
        assert apart.host_register(there, nbytes) == 712
    assert apart.host_unregister(start + 8) == 713
    assert apart.host_unregister(start) == 0
    assert apart.host_usage() == before
    assert not tensor.is_pinned()
    of_the_allocator = torch.zeros(1000, pin_memory=True)
    assert apart.host_unregister(of_the_allocator.data_ptr()) == 713
    assert apart.host_register(*bytes_of(of_the_allocator)) == 712


def test_a_freed_pinned_block_waits_for_its_copies_and_is_poisoned(side):
    apart.set_poison(True)
    host = torch.ones(1000, pin_memory=True)
    where = host.data_ptr()
    with apart.paused(side):
        with side:
            there = host[100:].to("apart", non_blocking=True)
        del host
        assert apart.host_usage().waiting_blocks == 1
        assert torch.empty(1000, pin_memory=True).data_ptr() != where
    side.synchronize()
    assert apart.host_usage().waiting_blocks == 0
    again = torch.empty(1000, pin_memory=True)
    assert again.data_ptr() == where
    assert again.isnan().all() and there.eq(1).all()


def test_who_reads_before_the_copy_is_done_sees_poison(host, side):
    apart.set_poison(True)
    there = torch.ones(1000, device="apart")
    side.wait_stream(torch.accelerator.current_stream())
    with apart.paused(side):
        with side:
            host.copy_(there, non_blocking=True)
        assert host.isnan().all()
    side.synchronize()
    assert host.eq(1).all()
