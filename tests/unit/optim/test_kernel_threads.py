"""How many threads kernels take, and that none of them is left behind or waits in a loop."""

import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_cxl import CPUAdam, OffloadConfig
from lightning_cxl.gradients.meter import GradientMeter
from lightning_cxl.native import _cpu
from lightning_cxl.optim.threads import kernel_threads


@pytest.mark.parametrize(
    ("cpus", "options", "computes_on_host", "expected"),
    [
        (16, {}, False, 14),
        (3, {}, False, 1),
        (2, {}, False, 1),
        (1, {}, False, 1),
        (16, {}, True, 16),
        (16, {"overlap_step": True, "stream_weights": True}, True, 16),
        (16, {"overlap_step": False}, False, 16),
        (16, {"cpu_adam": False}, False, 16),
        (16, {"num_threads": 16}, False, 16),
        (16, {"num_threads": 3}, False, 3),
    ],
)
def test_cores_are_left_to_those_who_keep_a_device_busy(cpus, options, computes_on_host, expected, monkeypatch):
    monkeypatch.setattr(_cpu, "available_threads", lambda: cpus)
    assert kernel_threads(OffloadConfig(**options), computes_on_host) == expected


def tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def run_kernels(num_threads: int) -> None:
    meter = GradientMeter(num_threads)
    weight = torch.nn.Parameter(torch.zeros(1 << 20))
    weight.grad = torch.zeros(1 << 20)
    meter.copy(torch.ones(1 << 20), weight.grad)
    meter.accumulate(torch.ones(1 << 20), weight.grad, 1)
    CPUAdam([weight], num_threads=num_threads).step()


def test_no_thread_of_a_kernel_waits_for_the_next_call():
    run_kernels(1)  # what torch starts, it has started
    before = tasks()
    runner = threading.Thread(target=run_kernels, args=(4,))  # threads of a pool would belong to this one
    runner.start()
    runner.join()
    run_kernels(4)
    deadline = time.monotonic() + 5
    while tasks() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # the system takes a moment to forget a thread that has been joined
    assert tasks() <= before
