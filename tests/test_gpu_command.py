"""`make gpu` goes on whatever happens to a part, and says what happened."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_cxl.errors import PinnedMemoryError
from tests import training_device
from tests.gpu import __main__ as gpu


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "state", "figures"),
    [
        ("print('{\"a\": 1}'); raise SystemExit('broken')", "failed", {"a": 1}),
        ('print(\'{"state": "skipped", "reason": "one device"}\')', "skipped", {"reason": "one device"}),
        ("print('nothing')", "failed", None),
    ],
)
def test_a_part_passes_only_with_figures_and_keeps_its_error(code, state, figures):
    part = gpu.with_figures(gpu.run(python(code), 60))
    assert (part["state"], part.get("figures")) == (state, figures)
    assert ("broken" in part.get("error", "")) == ("broken" in code)


@pytest.mark.full
def test_updates_run_behind_the_backward_where_the_overlap_is_measured():
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.checks", "overlap", "apart"]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=False, timeout=400)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(line)["updates_behind_backward"] >= 6 * 8  # steps and units


def test_what_is_page_locked_on_cuda_is_counted(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no driver")

    driver = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    devices = training_device.CountedCuda()
    devices.register(4096, 10)
    driver.cudaHostRegister = refuse
    with pytest.raises(PinnedMemoryError):
        devices.register(8192, 10)
    assert devices.registered == {4096}
    devices.unregister(4096)
    assert not devices.registered
