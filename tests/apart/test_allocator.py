import pytest
import torch

from tests import apart

N = 10_007  # floats; blocks of this size are used here alone
BYTES = -(-N * 4 // 512) * 512


def block():
    return torch.empty(N, device="apart")


@pytest.fixture(autouse=True)
def _empty():
    torch.accelerator.empty_cache()
    torch.apart.reset_peak_memory_stats()
    torch.apart.reset_accumulated_memory_stats()


def test_a_freed_block_is_taken_again_at_once_and_stays_with_its_stream(side):
    with apart.paused(torch.accelerator.current_stream()):  # what still runs there comes before what is to come
        first, second = block().data_ptr(), block().data_ptr()
    assert first == second
    with side:
        assert block().data_ptr() != first
    assert block().data_ptr() == first


@pytest.mark.parametrize("recorded", [False, True])
def test_record_stream_keeps_a_block_until_the_stream_has_passed(side, recorded):
    x = block().fill_(1)
    where = x.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    with apart.paused(side):
        with side:
            y = x * 1
        if recorded:
            x.record_stream(side)
        del x
        assert (block().fill_(2).data_ptr() == where) != recorded
        torch.accelerator.current_stream().synchronize()
    side.synchronize()
    assert y.eq(1 if recorded else 2).all()  # as on a GPU: wrong, and no error
    assert where in [b.data_ptr() for b in [block(), block()]]


def test_bytes_are_counted_and_come_back_to_zero(side):
    assert torch.apart.memory_allocated() == torch.apart.memory_reserved() == 0
    x, y = block(), block()
    assert torch.apart.memory_allocated() == torch.apart.memory_reserved() == 2 * BYTES
    with side:
        x.record_stream(side)
    del x, y
    assert (torch.apart.memory_allocated(), torch.apart.memory_reserved()) == (0, 2 * BYTES)
    torch.accelerator.empty_cache()
    assert torch.apart.memory_reserved() == 0


def test_no_more_than_the_capacity():
    apart.set_capacity(3 * BYTES)
    kept = [block() for _ in range(3)]
    told = rf"Tried to allocate {N * 4} bytes on device 0; {3 * BYTES} of {3 * BYTES}"
    with pytest.raises(torch.OutOfMemoryError, match=told):
        block()
    stats = torch.apart.memory_stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 1)
    kept.pop()
    block()
    with torch.apart.device(1):
        block()  # the other device has its own


def test_cached_blocks_are_given_up_before_it_is_out_of_memory(side):
    apart.set_capacity(3 * BYTES)
    small = [torch.empty(N // 3 - 128, device="apart") for _ in range(9)]
    with side:
        small[0].mul_(1)
        small[0].record_stream(side)
    del small
    large = torch.empty(3 * BYTES // 4, device="apart")
    stats = torch.apart.memory_stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (0, 1)
    assert torch.apart.memory_allocated() == large.nbytes
