"""A run that is killed at any moment, also while it saves, goes on with its newest checkpoint and ends as if nobody had."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.on_cpu, pytest.mark.slow]

FIFTY = pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(900)])


@pytest.mark.parametrize("num_kills", [7, FIFTY])
@pytest.mark.parametrize(
    "options",
    [["--checkpoint", "reference"], ["--checkpoint", "copy", "--overlap", "--device", "apart"]],
    ids=["reference", "copy"],
)
def test_kills(tmp_path, num_kills, options):
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.killed_run", tmp_path, "--kills", str(num_kills), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["kills"], result["lives"]) == (num_kills, num_kills + 1)
    assert (result["lost"], result["wrong_losses"], result["same_result"]) == (0, 0, True)
    assert result["losses"] > result["steps"], "no step was taken twice: the kills were not felt"
    assert all("part" not in name and "new" not in name for name in result["in_folder"])
