import json
import subprocess
import sys

import pytest

from tests.gpu import __main__ as gpu


@pytest.mark.parametrize(
    ("code", "state", "figures"),
    [
        ("print('{\"a\": 1}'); raise SystemExit('broken')", "failed", {"a": 1}),
        ('print(\'{"state": "skipped", "reason": "one device"}\')', "skipped", {"reason": "one device"}),
        ("print('nothing')", "failed", None),
    ],
)
def test_a_part_passes_only_with_figures_and_keeps_its_error(code, state, figures):
    part = gpu.with_figures(gpu.run([sys.executable, "-c", code], 60))
    assert (part["state"], part.get("figures")) == (state, figures)
    assert ("broken" in part.get("error", "")) == ("broken" in code)


@pytest.mark.full
def test_updates_run_behind_the_backward_where_the_overlap_is_measured():
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.checks", "overlap", "apart"]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=False, timeout=400)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(line)["updates_behind_backward"] >= 6 * 8  # steps and units
