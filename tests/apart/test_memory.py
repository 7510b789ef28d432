import ctypes
import errno
import faulthandler
import os
import resource
import signal
import tempfile

import pytest
import torch

from tests import apart

libc = ctypes.CDLL(None, use_errno=True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("write", [False, True])
def test_a_host_access_kills_the_process(write):
    tensor = torch.ones(4, device="apart")
    torch.accelerator.synchronize()
    host = ctypes.create_string_buffer(16)
    if not (child := os.fork()):
        faulthandler.disable()  # it would tell of the death
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.memmove(*((tensor.data_ptr(), host) if write else (host, tensor.data_ptr())), 16)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_the_kernel_finds_no_memory_at_a_data_ptr():
    tensor = torch.ones(4, device="apart:1")
    torch.accelerator.synchronize(1)
    with tempfile.TemporaryFile() as file:
        assert libc.write(file.fileno(), ctypes.c_void_p(tensor.data_ptr()), 16) == -1
        assert ctypes.get_errno() == errno.EFAULT


def test_a_storage_grows_and_keeps_its_bytes():
    tensor = torch.arange(4.0, device="apart")
    tensor.resize_(1000)
    assert tensor[:4].tolist() == [0, 1, 2, 3]
    tensor.untyped_storage().resize_(0)
    assert torch.apart.memory_allocated() == 0


def test_fresh_and_freed_memory_is_poisoned():
    apart.set_poison(True)
    tensor = torch.empty(100_003, device="apart")
    assert tensor.isnan().all()
    tensor.zero_()
    where = tensor.data_ptr()
    del tensor
    again = torch.empty(100_003, device="apart")
    assert again.data_ptr() == where
    assert again.isnan().all()


def test_poison_comes_in_the_order_of_the_stream_and_before_another_one_has_the_memory(side):
    apart.set_poison(True)
    tensor = torch.ones(1000, device="apart")
    torch.accelerator.synchronize()
    with apart.paused(torch.accelerator.current_stream()):
        doubled = tensor * 2
        del tensor
    assert doubled.eq(2).all()
    with apart.paused(torch.accelerator.current_stream()):
        tensor = torch.empty(100_019, device="apart")
        with side:
            tensor.zero_()
        side.synchronize()
    torch.accelerator.synchronize()
    assert tensor.eq(0).all()


def test_there_are_two_devices():
    assert torch.accelerator.device_count() == torch.apart.device_count() == 2
    first, second = (torch.ones(2, device=f"apart:{i}") for i in (0, 1))
    assert (first.device.index, second.device.index) == (0, 1)
    assert second.to("apart:0").add(first).tolist() == [2, 2]
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*apart:0 and apart:1"):
        first + second
    with pytest.raises(RuntimeError, match="no device"):
        torch.ones(2, device="apart:2")
