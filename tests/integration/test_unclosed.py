"""Trainings that nobody has ended, and that the garbage collector finds, in whatever thread and moment that is."""

import gc
import subprocess
import sys
import threading
import time

import pytest
import torch
from lightning.fabric import Fabric

import lightning_cxl
from lightning_cxl.memory.hook import active
from lightning_cxl.memory.resource import PoolResource
from lightning_cxl.run import session as unclosed
from lightning_cxl.run.session import close_garbage
from lightning_cxl.run.user_loop import UserLoop
from tests import training_device
from tests.integration.accelerate_loop import (
    forget_accelerators,
    make_accelerator,
    prepared,
    steps,
)
from tests.models import TinyTransformer, token_data

STREAMED = {"stream_weights": True}


@pytest.fixture(autouse=True)
def _garbage_is_found_when_a_test_says_so():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def nothing_is_left(on_device):
    """Return what says whether all memory is free, once garbage is closed. References to garbage are dead before."""
    gc.collect()
    before = training_device.held()

    def is_so():
        gc.collect()
        return training_device.held() == before

    return is_so


def forgotten(offload=STREAMED):
    """Train, and let go of everything without an end."""
    accelerator = make_accelerator(offload)
    parts = prepared(accelerator, data=lambda: token_data(2))
    list(steps(accelerator, *parts))
    del accelerator, parts
    forget_accelerators()


def collect():
    """Collect garbage until a loop is found: writes and updates that are under way hold what they use."""
    deadline = time.monotonic() + 30
    while not unclosed._garbage and time.monotonic() < deadline:
        gc.collect()


def test_it_is_closed_when_the_next_loop_begins(nothing_is_left):
    forgotten()
    collect()
    assert len(unclosed._garbage) == 1, "the collector itself closes nothing"
    accelerator = make_accelerator(STREAMED)
    accelerator.prepare(TinyTransformer())
    assert not unclosed._garbage
    accelerator.free_memory()
    assert nothing_is_left()
    assert active() is None


def test_it_is_closed_when_another_model_computes():
    accelerator = make_accelerator(STREAMED)
    other = accelerator.prepare(TinyTransformer())
    forgotten()
    collect()
    assert len(unclosed._garbage) == 1
    other(torch.ones(1, 4, dtype=torch.long, device=training_device.current))
    assert not unclosed._garbage
    accelerator.free_memory()


def test_the_collector_comes_while_a_lock_is_held(monkeypatch, nothing_is_left):
    """Memory of the loop is still what `empty` uses, and the pool is in the middle of an allocation."""
    forgotten()
    drain = PoolResource._drain

    def collecting(pool):
        collect()
        drain(pool)

    monkeypatch.setattr(PoolResource, "_drain", collecting)
    assert lightning_cxl.empty(1000).numel() == 1000
    monkeypatch.undo()
    close_garbage()
    assert nothing_is_left()


def forgotten_with_fabric():
    fabric = Fabric(accelerator="cpu", devices=1, strategy="cxl_offload")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.on_cpu
@pytest.mark.parametrize("forget", [lambda: forgotten({}), forgotten_with_fabric])
def test_it_is_found_where_the_cpu_computes(forget):
    """What torch holds of hooks, the collector does not see; there are more of them where the weights are at home."""
    forget()
    collect()
    assert len(unclosed._garbage) == 1
    close_garbage()
    assert active() is None


@pytest.mark.parametrize("step", [collect, close_garbage])
def test_it_ends_in_another_thread(step, nothing_is_left):
    forgotten()
    for each in (collect, close_garbage):
        if each is step:
            thread = threading.Thread(target=each)
            thread.start()
            thread.join()
        else:
            each()
    assert lightning_cxl.empty(1000).numel() == 1000
    assert active() is None
    assert nothing_is_left()


def test_a_run_that_is_ended_in_another_thread_is_over():
    accelerator = make_accelerator(STREAMED)
    accelerator.prepare(TinyTransformer())
    thread = threading.Thread(target=accelerator.free_memory)
    thread.start()
    thread.join()
    assert active() is None
    assert lightning_cxl.empty(1000).numel() == 1000


def test_state_on_ssd_is_let_go_of(tmp_path, nothing_is_left):
    ssd = {
        "tiers": {"ssd": {"path": str(tmp_path), "budget": "64MiB"}},
        "tier_rules": {"*": {"optimizer_state": "ssd"}},
    }
    for _ in range(2):  # then the folder is free
        forgotten({**STREAMED, **ssd})
        collect()
        close_garbage()
    assert nothing_is_left()


def test_its_errors_are_not_those_of_who_closes_it(monkeypatch, caplog, nothing_is_left):
    forgotten()
    collect()
    end = UserLoop.abandon

    def failing(loop):
        end(loop)
        raise MemoryError("no memory for the last update")

    monkeypatch.setattr(UserLoop, "abandon", failing)
    close_garbage()
    assert "no memory for the last update" in caplog.text
    assert nothing_is_left()


FORKS = """
import os, sys, threading, time
from accelerate import Accelerator
import torch
from lightning_cxl.accelerate import CXLAccelerator
accelerator = CXLAccelerator()
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 8)).sum())
optimizer.step()
if os.fork() == 0:
    accelerator.offload.abandon = lambda: os._exit(3)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.on_cpu
def test_a_forked_child_ends_nothing():
    """It has neither the threads nor the files of its parent: it would wait for them for ever."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0"], done.stderr
