"""Starts the ranks of `shared_host_run.py`, and reads what they have written."""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def folder_of(cases, ranks):
    """Run cases in the same processes, once; return the folder with results, and what was said."""
    folder = tempfile.TemporaryDirectory(prefix="shared_host")
    command = [sys.executable, "-m", "tests.integration.shared_host_run", folder.name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), *cases], env=environment, stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=280)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return folder, said


def results(case, cases, ranks=2):
    """Return what a case has given on each rank that came to its end; it runs together with `cases`."""
    folder, said = folder_of(cases, ranks)
    found = [path for rank in range(ranks) if (path := Path(folder.name, f"{case}.{rank}.pt")).exists()]
    assert found, "\n".join(said)
    return [torch.load(path, weights_only=False) for path in found]


def assert_same_bits(result):
    """Compare losses and weights without and with shared weights; return how often was gathered."""
    (losses, weights, gathers), (shared_losses, shared_weights, shared_gathers) = result
    assert losses == shared_losses
    assert weights.keys() == shared_weights.keys()
    assert all(torch.equal(weights[name], shared_weights[name]) for name in weights)
    return gathers, shared_gathers
