"""Loops of Fabric, Accelerate and transformers under the launchers of each: ranks meet; one that fails ends all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration import own_loops
from tests.integration.several_ranks import ROOT, free_port

pytestmark = [pytest.mark.on_cpu, pytest.mark.slow]
CASES = [("fabric", "fabric run"), ("accelerate", "accelerate launch")]
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: "no"
num_machines: 1
num_processes: 2
"""
"""For `accelerate launch`, which starts several processes on the CPU alone through MPI only."""


def command(launcher, folder):
    """Return what starts two processes of a program on this machine."""
    port, programs = str(free_port()), Path(sys.executable).parent
    (folder / "config.yaml").write_text(CONFIG)
    return {
        "itself": [sys.executable],
        "torchrun": [programs / "torchrun", "--standalone", "--nproc-per-node=2"],
        "fabric run": [programs / "fabric", "run", "--devices=2", "--accelerator=cpu", f"--main-port={port}"],
        "accelerate launch": [
            programs / "accelerate", "launch", f"--config_file={folder / 'config.yaml'}", f"--main_process_port={port}",
        ],
    }[launcher]  # fmt: skip


def run(loop, launcher, folder, *arguments, seconds=240):
    """Return exit code, what was printed, and the seconds from the moment of the failure on."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "MASTER_", "WORLD_", "ACCELERATE_"))}
    clean.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    failed, path = None, folder / "log"
    with path.open("w") as log:
        process = subprocess.Popen(
            [*command(launcher, folder), own_loops.__file__, loop, str(folder), *arguments],
            env=clean, cwd=folder, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + seconds
        while process.poll() is None:
            if failed is None and "failing" in path.read_text():
                failed = time.monotonic()
            assert time.monotonic() < end, path.read_text()[-3000:]
            time.sleep(0.05)
        return process.returncode, path.read_text(), 0.0 if failed is None else time.monotonic() - failed
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(("loop", "launcher"), CASES)
@pytest.mark.full
def test_two_processes_share_a_model(tmp_path, loop, launcher):
    code, log, _ = run(loop, launcher, tmp_path)
    assert code == 0, log[-3000:]
    (world, cut, total), other = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert world == 2 and cut > 9 and other == [world, cut, total]


@pytest.mark.full
def test_a_rank_that_raises_is_shown(tmp_path):
    code, log, took = run("trainer", "torchrun", tmp_path, "--fail=raise", "--rank=1")
    assert code != 0 and 0 < took < 60
    assert "ValueError: this batch is bad" in log
    assert "NoneType: None" not in log and "To enable traceback see" not in log, "torchrun has the traceback"


@pytest.mark.full
def test_a_forked_process_that_ends_first_has_not_failed(tmp_path):
    code, log, _ = run("notebook", "itself", tmp_path)
    assert code == 0, log[-3000:]
    assert len(list(tmp_path.glob("rank_*.json"))) == 2
