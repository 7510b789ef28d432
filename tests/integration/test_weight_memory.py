"""Memory while weights are loaded and saved, of a model of 400 MiB, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "integration" / "weight_memory.py"

pytestmark = [pytest.mark.on_cpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def measure(tmp_path_factory):
    """Returns what memory a task takes."""
    folder = tmp_path_factory.mktemp("weights")
    script = subprocess.Popen(
        [sys.executable, "-W", "ignore", SCRIPT, folder],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(task):
        print(task, file=script.stdin, flush=True)
        return json.loads(script.stdout.readline())

    ask("make")
    yield ask
    script.communicate()


@pytest.mark.parametrize("task", ["load", "load bf16 in a run"])
def test_loading_adds_the_model_and_at_most_20_mib(measure, task):
    """A piece for conversion is 16 MiB; in a run, tiers hold whole slabs."""
    used = measure(task)
    assert used["model_mib"] == pytest.approx(200 if "bf16" in task else 400, rel=0.01)
    assert used["model_mib"] - 2 < used["peak_mib"] < used["model_mib"] + 20
    assert used["end_mib"] < used["model_mib"] + 20


@pytest.mark.parametrize("task", ["save bf16", "checkpoint of views", "resume"])
@pytest.mark.full
def test_saving_and_checkpoints_add_at_most_20_mib(measure, task):
    """Also with optimizer state, twice the model, and with parameters that are views of one piece of memory."""
    used = measure(task)
    assert used["model_mib"] == pytest.approx(400, rel=0.01)
    assert used["peak_mib"] < 20 and used["end_mib"] < 5
