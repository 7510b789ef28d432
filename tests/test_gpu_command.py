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


@pytest.mark.full
def test_a_part_that_hangs_is_ended_with_what_it_has_started():
    code = (
        "import subprocess, sys; print('begun'); subprocess.run([sys.executable, '-c', 'import time; time.sleep(999)'])"
    )
    part = gpu.run(python(code), 10)
    assert part["state"] == "timeout"
    assert part["seconds"] < 200
    assert "begun" in part["error"]


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


def test_tests_are_counted_one_by_one_and_those_that_take_long_left_out(tmp_path):
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--device')\n")
    tests = tmp_path / "test_four.py"
    tests.write_text(
        "import pytest\n\ndef test_good(): pass\n\ndef test_bad(): assert 1 == 2\n\n"
        "@pytest.mark.skip(reason='no such device')\ndef test_absent(): pass\n\n"
        "@pytest.mark.full\ndef test_long(): assert False\n"
    )
    part = gpu.pytest([str(tests)], "cpu", 100)
    figures = part["figures"]
    assert part["state"] == "failed"
    assert (figures["passed"], figures["failed"], figures["skipped"]) == (1, 1, 1)
    assert "assert 1 == 2" in figures["failures"][0]["error"]
    assert "no such device" in figures["reasons_to_skip"][0]


def test_the_file_is_written_and_tells_what_was_not_run(tmp_path):
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "tests.gpu", "--minutes", "0", "--only", "overlap", "--json", str(path)]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr  # a part that was not run is no success
    assert json.loads(path.read_text())["states"] == {"overlap": "no time"}


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
