"""Trainings that a program drops without `close`, in whatever thread and moment the garbage collector finds them."""

import gc
import subprocess
import sys
import threading
import time

import pytest

import lightning_cxl
from lightning_cxl.memory.hook import active
from lightning_cxl.memory.resource import PoolResource
from lightning_cxl.run import user_loop
from lightning_cxl.run.user_loop import close_dropped
from tests import training_device
from tests.integration.accelerate_loop import forget_accelerators, make_accelerator, prepared, steps
from tests.models import TinyTransformer, token_data

STREAMED = {"stream_weights": True}


@pytest.fixture(autouse=True)
def _the_collector_runs_when_a_test_says_so():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def assert_all_is_free(on_device):
    gc.collect()
    before = training_device.held()

    def check():
        gc.collect()
        assert training_device.held() == before
        assert active() is None

    return check


def drop(offload=STREAMED):
    """Train, drop everything without an end, and collect until the loop is found: running copies hold what they use."""
    accelerator = make_accelerator(offload)
    parts = prepared(accelerator, data=lambda: token_data(2))
    list(steps(accelerator, *parts))
    del accelerator, parts
    forget_accelerators()


def collect():
    deadline = time.monotonic() + 30
    while not user_loop._dropped and time.monotonic() < deadline:
        gc.collect()
    assert len(user_loop._dropped) == 1, "the collector itself closes nothing"


def test_the_next_loop_closes_it_when_it_prepares(assert_all_is_free):
    drop()
    collect()
    accelerator = make_accelerator(STREAMED)
    accelerator.prepare(TinyTransformer())
    assert not user_loop._dropped
    accelerator.free_memory()
    assert_all_is_free()


def test_the_collector_comes_while_a_lock_is_held(monkeypatch, assert_all_is_free):
    """Memory of the loop is still what `empty` uses, and the pool is in the middle of an allocation."""
    drop()
    drain = PoolResource._drain

    def collecting(pool):
        if not user_loop._dropped:
            collect()
        drain(pool)

    monkeypatch.setattr(PoolResource, "_drain", collecting)
    assert lightning_cxl.empty(1000).numel() == 1000
    monkeypatch.undo()
    thread = threading.Thread(target=close_dropped)
    thread.start()
    thread.join()
    assert_all_is_free()


def test_the_folder_of_state_on_ssd_is_free_again(tmp_path, assert_all_is_free):
    ssd = {
        "tiers": {"ssd": {"path": str(tmp_path), "budget": "64MiB"}},
        "tier_rules": {"*": {"optimizer_state": "ssd"}},
    }
    for _ in range(2):
        drop({**STREAMED, **ssd})
        collect()
        close_dropped()
    assert_all_is_free()


def test_its_errors_are_not_those_of_the_code_that_closes_it(monkeypatch, caplog, assert_all_is_free):
    drop()
    collect()
    close = user_loop.UserLoop.close

    def failing(loop):
        close(loop)
        raise MemoryError("no memory for the last update")

    monkeypatch.setattr(user_loop.UserLoop, "close", failing)
    close_dropped()
    assert "no memory for the last update" in caplog.text
    assert_all_is_free()


UNCLOSED = """
import os, sys
import torch
from lightning_cxl.accelerate import CXLAccelerator
from lightning_cxl.run.user_loop import UserLoop
ssd = {"tiers": {"ssd": {"path": sys.argv[1], "budget": "64MiB"}}, "tier_rules": {"*": {"optimizer_state": "ssd"}}}
accelerator = CXLAccelerator(offload=ssd)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 8)).sum())
optimizer.step()
if os.fork() == 0:
    UserLoop.close = lambda loop: os._exit(3)  # it would wait for threads of its parent
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.on_cpu
def test_a_program_and_its_forked_child_end_without_close(tmp_path):
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0"] and not done.stderr
