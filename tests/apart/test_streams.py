import threading
import time

import pytest
import torch

from tests import apart

LONG_ENOUGH = 0.2  # seconds in which work that does not wait has run, on any but a very busy machine


def test_the_host_runs_ahead_of_kernels_which_keep_their_order():
    stream, expected = torch.accelerator.current_stream(), 0
    x = torch.zeros(1, device="apart")
    with apart.paused(stream):
        for _ in range(50):
            x.mul_(2).add_(1).remainder_(1009)
            expected = (expected * 2 + 1) % 1009
        assert not stream.query()
    stream.synchronize()
    assert stream.query()
    assert x.item() == expected


def test_a_stream_waits_for_a_stream_only_where_it_is_told_to(side):
    x = torch.zeros(4, device="apart")
    torch.accelerator.synchronize()
    with apart.paused(torch.accelerator.current_stream()):
        x.add_(1)
        with side:
            seen = x.to("cpu")
        assert seen.tolist() == [0, 0, 0, 0]
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x * 1
        time.sleep(LONG_ENOUGH)
        assert not side.query()
    side.synchronize()
    assert y.tolist() == [1, 1, 1, 1]


def test_a_wait_takes_the_record_there_is(side):
    default = torch.accelerator.current_stream()
    event = torch.Event(device="apart")
    default.record_event(event)
    event.synchronize()
    side.wait_event(event)
    with apart.paused(default):
        default.record_event(event)  # later than the wait
        assert not event.query()
        side.synchronize()  # does not hang
    event.synchronize()
    assert event.query()


def test_a_number_of_the_host_is_read_at_the_call():
    number = torch.tensor(2.0)
    x = torch.ones(4, device="apart")
    with apart.paused(torch.accelerator.current_stream()):
        y = x * number
        number.fill_(7)
    assert y.tolist() == [2, 2, 2, 2]


def test_an_error_of_a_kernel_is_heard_at_the_next_wait():
    table = torch.ones(4, 2, device="apart")
    wrong = torch.tensor([9], device="apart")
    rows = torch.nn.functional.embedding(wrong, table)
    with pytest.raises(IndexError, match="out of range"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()  # once
    assert rows.shape == (1, 2)


def test_a_wait_lets_other_threads_of_python_run():
    stream = torch.accelerator.current_stream()
    ready, went_on = threading.Event(), threading.Event()

    def unpause():
        ready.wait()
        went_on.set()
        torch.ops.apart.pause(stream.device_index, stream.stream_id, 0)

    thread = threading.Thread(target=unpause)
    thread.start()
    with apart.paused(stream):
        torch.ones(4, device="apart")
        ready.set()
        stream.synchronize()
    thread.join()
    assert went_on.is_set()


def test_a_copy_between_devices_waits_for_both(side):
    source = torch.zeros(4, device="apart:0")
    target = torch.zeros(4, device="apart:1")
    torch.accelerator.synchronize(1)
    with apart.paused(torch.accelerator.current_stream(0)):
        source.add_(1)
        target.copy_(source, non_blocking=True)
        target.add_(1)
        time.sleep(LONG_ENOUGH)
        assert not torch.accelerator.current_stream(1).query()
    assert target.tolist() == [2, 2, 2, 2]


def test_backward_runs_on_the_devices_thread_and_on_the_stream_of_forward(side):
    threads = []
    weight = torch.ones(4, device="apart", requires_grad=True)
    weight.register_hook(lambda grad: threads.append(threading.get_ident()))
    torch.accelerator.synchronize()
    with side:
        loss = (weight * 3).sum()
    loss.backward()
    assert weight.grad.tolist() == [3, 3, 3, 3]
    assert threads and threads[0] != threading.get_ident()


def test_halfway_a_task_has_begun_and_not_ended():
    stream = torch.accelerator.current_stream()
    x = torch.ones(4, device="apart")
    stream.synchronize()
    with apart.halfway(stream) as reached:
        x.add_(1)
        reached()
        assert not stream.query()
    assert x.tolist() == [2, 2, 2, 2]
