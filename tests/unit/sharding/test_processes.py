"""Process groups that a run makes beside the first."""

import os
import subprocess
import sys

from tests.integration.several_ranks import ROOT


def run_two(code, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, str(rank), str(folder)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [rank.communicate(timeout=100) for rank in ranks]
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, ended, strict=True)]


GROUPS_OF_A_MESH = """
import datetime, sys
import torch
import torch.distributed as dist
from lightning_cxl import torch_private
from lightning_cxl.sharding import processes

limit = datetime.timedelta(seconds=77)
meeting = f"file://{sys.argv[2]}/meeting"
dist.init_process_group("gloo", init_method=meeting, rank=int(sys.argv[1]), world_size=2, timeout=limit)
mesh = processes.make_mesh(torch.device("cpu"), 2, 1, replicate=True)
print([torch_private.timeout_s(group) for group in mesh.get_all_groups()])
"""


def test_groups_of_a_mesh_wait_as_long_as_all_do(tmp_path):
    for status, output, errors in run_two(GROUPS_OF_A_MESH, tmp_path):
        assert (status, output) == (0, "[77.0, 77.0]\n"), errors
