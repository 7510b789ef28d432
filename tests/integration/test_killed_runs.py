"""A run that is killed at any moment, also while it saves, goes on with its newest checkpoint; its end is the same."""

import json
import os

import pytest

from lightning_cxl.storage.store import Store
from tests.integration.test_state_on_ssd import REFERENCE, every_step, fit, on_ssd
from tests.processes import run_python

pytestmark = pytest.mark.slow


@pytest.mark.on_cpu
@pytest.mark.parametrize(
    ("num_kills", "options"),
    [
        (7, ["--checkpoint", "reference", "--state", "8bit"]),
        (20, ["--checkpoint", "copy", "--overlap", "--device", "apart"]),
        (21, ["--checkpoint", "reference", "--overlap", "--device", "apart", "--everything"]),
    ],
    ids=["reference", "copy", "everything"],
)
def test_kills(tmp_path, num_kills, options):
    """Each phase is met one time, four times and three times; the program alone kills as often as it is told to."""
    command = ["-m", "tests.integration.killed_run", tmp_path, "--kills", num_kills, *options]
    done = run_python(*command, timeout=800, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["kills"], result["lives"]) == (num_kills, num_kills + 1)
    assert (result["lost"], result["wrong_losses"], result["same_result"]) == (0, 0, True)
    assert result["losses"] >= result["steps"]
    if num_kills > 7:  # of few kills all may come just after a step was saved
        assert result["losses"] > result["steps"], "no step was taken twice: the kills were not felt"
    assert result["partial_files"] == 0
    assert all(not name.endswith((".partial", ".new")) for name in result["in_folder"])


def test_state_is_let_go_of_when_the_name_of_the_newer_file_lies_on_the_disk(tmp_path, monkeypatch):
    order = []

    def noting(owner, name, told):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            order.append(told(*args))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    noting(os, "replace", lambda _, new: f"named {os.path.basename(new)}")
    noting(os, "fsync", lambda fd: f"synced {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")
    noting(Store, "settle", lambda _, number: f"settled {number}")
    fit(on_ssd(tmp_path / "ssd", **REFERENCE), 2, callbacks=[every_step(tmp_path / "files")])
    named = order.index("named epoch=0-step=2.ckpt")
    assert order[named + 1 : named + 3] == ["synced files", "settled 2"]
