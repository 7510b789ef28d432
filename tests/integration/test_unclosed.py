"""Trainings that a program leaves open when it ends."""

import subprocess
import sys

import pytest

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
