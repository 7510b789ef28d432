"""Trainings that are not closed: a new one begins, or the program ends."""

import copy
import gc
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from lightning_cxl.errors import ConfigError
from tests import training_device
from tests.integration.accelerate_loop import adamw, make_accelerator, steps, warm
from tests.models import TinyTransformer, token_data

STREAMED = {"stream_weights": True, "cpu_adam": False}


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential], ids=["the model", "a module around it"])
def test_a_new_training_ends_the_one_that_had_the_model(wrap, caplog, on_device):
    def train(accelerator, model):
        optimizer = adamw(model)
        list(steps(accelerator, *accelerator.prepare(model, optimizer, token_data(2), warm(optimizer))))

    held = training_device.held()
    torch.manual_seed(5)
    ours = TinyTransformer(dropout=0.0)
    plain = copy.deepcopy(ours)
    first = make_accelerator(STREAMED)
    train(first, ours)
    second = make_accelerator(STREAMED)
    with caplog.at_level("INFO"):
        assert second.prepare(ours) is ours, "it may compute there"
        assert not caplog.records
        train(second, wrap(ours))
    assert "the training that TinyTransformer was part of has ended" in caplog.text
    with pytest.raises(ConfigError, match="no model has been prepared"):
        first.backward(torch.ones(1, requires_grad=True).sum())
    second.free_memory()
    for _ in range(2):
        train(make_accelerator(), plain)
    assert all(map(torch.equal, ours.cpu().parameters(), plain.cpu().parameters()))
    del first, second, ours
    gc.collect()
    assert all(nbytes <= held[where] for where, nbytes in training_device.held().items())


def test_a_training_beside_an_open_one_is_told_what_that_holds(caplog, on_device):
    first, second = make_accelerator(STREAMED), make_accelerator(STREAMED)
    model = TinyTransformer()
    first.prepare(model, adamw(model))
    second.prepare(TinyTransformer())
    assert re.search(r"another training is open, and holds \d+\.\d KiB of host memory until", caplog.text)
    first.free_memory()
    second.free_memory()


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
