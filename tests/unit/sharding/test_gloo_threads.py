"""A process ends well although gloo still holds a tensor of its last collective when Python begins to end."""

import os
import subprocess
import sys

from tests.integration.several_ranks import ROOT

PAIRS_OF_RANKS = """
import array, datetime, os, sys, time
import torch
import torch.distributed as dist
from lightning_cxl.sharding import processes


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)


def rank(number, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}", rank=number, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    mesh = processes.make_mesh(torch.device("cpu"), 1, 2, replicate=False)
    dist.barrier()
    end = time.monotonic() + 60
    while len(processes._gloo_states()) < 2:  # each names itself as it begins
        assert time.monotonic() < end
    sys.setswitchinterval(1000)  # as good as never: no other thread gets the interpreter's lock from a loop
    values = array.array("f", [1]) * 5_000_000
    dist.all_reduce(torch.frombuffer(values, dtype=torch.float32), async_op=True)
    while values[0] == 1 or values[-1] == 1:  # gloo gets the sum, and holds the last reference to the tensor
        pass
    end = time.monotonic() + 0.2
    while time.monotonic() < end:  # its thread now waits for the interpreter's lock
        pass
    return mesh  # it holds the process group


for pair in range(4):
    children = []
    for number in range(2):
        if (child := os.fork()) == 0:
            mesh = rank(number, f"{sys.argv[1]}/{pair}")
            slow = Slow()  # ends while Python ends: other threads have the time to run
            sys.exit()
        children.append(child)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)
"""


def test_no_thread_of_gloo_aborts_a_process_that_ends(tmp_path):
    """Without the wait about every second process is aborted, so four pairs of them."""
    ended = subprocess.run(
        [sys.executable, "-c", PAIRS_OF_RANKS, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.stdout.split("\n") == ["[0, 0]"] * 4 + [""], ended.stderr
