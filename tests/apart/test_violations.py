import ctypes

import pytest
import torch

from tests import apart

N = 1000


@pytest.fixture
def there():
    tensor = torch.ones(N, device="apart")
    torch.accelerator.synchronize()
    yield tensor
    tensor.set_()  # pytest keeps the tensor for a while


def expect_one(text):
    torch.accelerator.synchronize()
    (seen,) = apart.clear_violations()
    assert text in seen


def write_on_the_device(there, host):
    there.add_(1)  # on the default stream
    torch.accelerator.current_stream().synchronize()


def free_on_the_device(there, host):
    apart.set_poison(True)
    there.untyped_storage().resize_(0)  # gives the block back, without record_stream
    torch.accelerator.current_stream().synchronize()


def write_on_the_host(there, host):
    host[500] = 7


@pytest.mark.parametrize(
    ("to_device", "act", "changed"),
    [
        (False, write_on_the_device, "source"),
        (False, free_on_the_device, "source"),
        (False, write_on_the_host, "destination"),
        (True, write_on_the_host, "source"),
        (True, write_on_the_device, "destination"),
    ],
)
def test_memory_is_accessed_while_it_is_copied(there, side, to_device, act, changed):
    host = torch.zeros(N, pin_memory=True)
    with apart.halfway(side) as reached:
        with side:
            there.copy_(host, non_blocking=True) if to_device else host.copy_(there, non_blocking=True)
        reached()
        act(there, host)
    where = f"{4 * N} bytes on stream {side.stream_id} of device 0, host memory at {hex(host.data_ptr())}"
    expect_one(f"{'h2d' if to_device else 'd2h'} of {where}: its {changed} changed while it was copied")


def test_the_source_of_an_h2d_is_written_before_its_turn(side):
    host = torch.zeros(N, pin_memory=True)
    with apart.paused(side):
        with side:
            host.to("apart", non_blocking=True)
        host[500] = 7
    expect_one("its source changed between the call and the copy's turn")


@pytest.mark.parametrize("to_device", [True, False])
def test_memory_in_use_is_unregistered(there, side, to_device):
    host = torch.zeros(N)
    assert apart.host_register(host.data_ptr(), host.nbytes) == 0
    with apart.paused(side):
        with side:
            there.copy_(host, non_blocking=True) if to_device else host.copy_(there, non_blocking=True)
        assert apart.host_unregister(host.data_ptr()) == 0
    expect_one(f"({4 * N} bytes) was unregistered while it is used: {'h2d' if to_device else 'd2h'}")


def test_pinned_memory_is_freed_while_an_alias_is_copied(side):
    host = torch.zeros(N, pin_memory=True)
    alias = torch.frombuffer((ctypes.c_float * (N - 10)).from_address(host.data_ptr() + 40), dtype=torch.float32)
    with apart.paused(side):
        with side:
            alias.to("apart", non_blocking=True)
        del host
    expect_one("was freed while it is used: h2d")


def test_there_and_back_again_in_order_is_none(there, side):
    host = torch.zeros(N, pin_memory=True)
    with apart.paused(side), side:
        for _ in range(3):
            host.copy_(there, non_blocking=True)
            back = host.to("apart", non_blocking=True)
            back.add_(1)
            there = back
    side.synchronize()
    assert there.eq(4).all()
    assert host.eq(3).all()


def test_a_write_behind_an_event_is_none(there, side):
    host = torch.zeros(N, pin_memory=True)
    apart.set_delay(h2d=0.01, d2h=0.01)
    with apart.paused(side):
        with side:
            host.copy_(there, non_blocking=True)
        done = side.record_event()
        torch.accelerator.current_stream().wait_event(done)
        there.add_(1)
    done.synchronize()
    host.add_(1)
    assert apart.host_register(host.data_ptr(), 1) == 712
    assert host.eq(2).all()


def test_a_freed_block_and_other_bytes_of_the_same_memory_are_free(there, side):
    host, freed = torch.zeros(2 * N, pin_memory=True), torch.zeros(N, pin_memory=True)
    with apart.paused(side):
        with side:
            host[:N].copy_(there, non_blocking=True)
            freed.copy_(there, non_blocking=True)
        host[N:] = 3
        del freed  # its allocator keeps it
    side.synchronize()
    assert host.tolist() == [1] * N + [3] * N


@pytest.mark.parametrize("waits", ["for the copy", "for a stream that waits for it", "not"])
def test_memory_is_given_back_while_another_stream_copies_it(there, side, waits):
    starter, owner = torch.Stream(device="apart"), torch.accelerator.current_stream()
    host = torch.zeros(N, pin_memory=True)
    with apart.paused(side):
        with side:
            host.copy_(there, non_blocking=True)
        starter.wait_stream(side)
        if waits != "not":
            owner.wait_stream(side if waits == "for the copy" else starter)
        there.set_()
        other = torch.full((N,), 7.0, device="apart")
    torch.accelerator.synchronize()
    if waits == "not":
        (seen,) = [each for each in apart.clear_violations() if "was given to" in each]
        assert f"stream {side.stream_id} of device 0" in seen
    else:
        assert host.eq(1).all()
    assert other.eq(7).all()
