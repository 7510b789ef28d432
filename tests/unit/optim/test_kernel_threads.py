"""How many threads kernels take, and that these sleep between calls."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_cxl import CPUAdam, OffloadConfig
from lightning_cxl.gradients.guard import Addition, GradientMeter
from lightning_cxl.native import _cpu
from lightning_cxl.optim.kernels import kernel_threads


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


def kernel_tasks() -> set[Path]:
    """Return the threads of kernels: they sleep between calls."""
    return {path for path in Path("/proc/self/task").iterdir() if (path / "comm").read_text() == "cxl-kernel\n"}


def seconds_on_cpu() -> float:
    return sum(int((path / "schedstat").read_text().split()[0]) for path in kernel_tasks()) / 1e9


def run_kernels(num_threads: int) -> None:
    meter = GradientMeter(num_threads)
    weight = torch.nn.Parameter(torch.zeros(1 << 20))
    weight.grad = torch.zeros(1 << 20)
    meter.copy_all([(torch.ones(1 << 20), weight.grad)])
    meter.accumulate_all([Addition(torch.ones(1 << 20), weight.grad, 1)])
    CPUAdam([weight], num_threads=num_threads).step()


def run_on_a_thread(num_threads: int) -> None:
    runner = threading.Thread(target=run_kernels, args=(num_threads,))
    runner.start()
    runner.join()


def test_calls_share_threads_that_sleep_between_them():
    run_kernels(4)
    before = kernel_tasks()
    assert len(before) >= 6  # three of each module
    for _ in range(20):
        run_on_a_thread(4)  # threads belong to no caller
        run_kernels(3)
    assert kernel_tasks() == before
    used = seconds_on_cpu()
    time.sleep(0.2)
    assert seconds_on_cpu() - used < 0.01


def test_kernels_run_in_a_forked_child():
    """Its parent's threads are not there, and its parent's list of them says otherwise."""
    run_kernels(4)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        run_kernels(4)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
