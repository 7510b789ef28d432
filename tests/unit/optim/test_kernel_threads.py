"""How many threads kernels take, and that these sleep between calls."""

import contextlib
import threading
import time
from pathlib import Path

import pytest
import torch

from lightning_cxl import CPUAdam, OffloadConfig
from lightning_cxl.gradients.guard import Addition, GradientMeter
from lightning_cxl.native import _cpu
from lightning_cxl.optim.kernels import kernel_threads
from tests.processes import run_python


@pytest.mark.parametrize(
    ("cpus", "options", "computes_on_host", "expected"),
    [
        (16, {}, False, 14), (3, {}, False, 1), (2, {}, False, 1), (1, {}, False, 1), (16, {}, True, 16),
        (16, {"overlap_step": True, "stream_weights": True}, True, 16), (16, {"overlap_step": False}, False, 16),
        (16, {"cpu_adam": False}, False, 16), (16, {"num_threads": 3}, False, 3),
    ],
)  # fmt: skip
def test_cores_are_left_to_those_who_keep_a_device_busy(cpus, options, computes_on_host, expected, monkeypatch):
    monkeypatch.setattr(_cpu, "available_threads", lambda: cpus)
    assert kernel_threads(OffloadConfig(**options), computes_on_host) == expected


def kernel_tasks() -> set[Path]:
    """Return the threads of kernels: they sleep between calls."""
    found = set()
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # another thread may have ended just now
            if (path / "comm").read_text() == "cxl-kernel\n":
                found.add(path)
    return found


def seconds_on_cpu() -> float:
    return sum(int((path / "schedstat").read_text().split()[0]) for path in kernel_tasks()) / 1e9


def run_kernels(num_threads: int, numel: int = 1 << 20) -> None:
    meter = GradientMeter(num_threads)
    weight = torch.nn.Parameter(torch.zeros(numel))
    weight.grad = torch.zeros(numel)
    meter.copy_all([(torch.ones(numel), weight.grad)])
    meter.accumulate_all([Addition(torch.ones(numel), weight.grad, 1)])
    CPUAdam([weight], num_threads=num_threads).step()


def run_on_a_thread(num_threads: int) -> None:
    runner = threading.Thread(target=run_kernels, args=(num_threads,))
    runner.start()
    runner.join()


def test_a_child_forked_before_or_after_the_first_call_runs_kernels():
    """With tensors so small that operators of torch take one thread: its others are the parent's."""
    code = """
import os, signal, torch
from lightning_cxl import CPUAdam
from lightning_cxl.gradients.guard import GradientMeter
torch.set_num_threads(2)  # kernels with as many threads take torch's, with others their own
weights = [torch.nn.Parameter(torch.zeros(30_000)) for _ in range(8)]
source, target = torch.ones(1 << 20), torch.empty(1 << 20)
for weight in weights:
    weight.grad = torch.zeros(30_000)
optimizers, meters = [CPUAdam(weights, num_threads=count) for count in (2, 4)], [GradientMeter(2), GradientMeter(4)]
torch.ones(1 << 22).add_(1)

def run():
    for optimizer, meter in zip(optimizers, meters):
        optimizer.step()
        meter.copy_all([(source, target)])

for _ in range(2):  # the second child's parent has threads, which the child has not
    if os.fork() == 0:
        signal.alarm(30)
        run()
        os._exit(0)
    assert os.wait()[1] == 0
    run()
"""
    assert run_python("-c", code).returncode == 0


def test_calls_beside_the_main_thread_share_threads_that_sleep_between_them():
    run_on_a_thread(4)
    before = kernel_tasks()
    assert len(before) >= 6  # three of each module
    for _ in range(20):
        run_on_a_thread(4)  # threads belong to no caller
        run_on_a_thread(3)
    assert kernel_tasks() == before
    used = seconds_on_cpu()
    time.sleep(0.2)
    assert seconds_on_cpu() - used < 0.01


@pytest.fixture
def torch_threads():
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(1)


@pytest.mark.parametrize("numel", [1 << 17, 1 << 19, 1 << 20])  # the smaller ones are work for two of them
def test_on_the_main_thread_kernels_run_on_torchs_threads_and_end_none(torch_threads, numel):
    torch.ones(1 << 22).add_(1)
    before = set(Path("/proc/self/task").iterdir())
    run_kernels(torch_threads, numel)
    assert set(Path("/proc/self/task").iterdir()) == before
