import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.sharding import processes
from lightning_cxl.sharding.fsdp import refuse_other_cuts
from lightning_cxl.sharding.processes import ranks_of_each
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


for pair in range(int(sys.argv[2])):
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
    """Without the wait about every second process is aborted, so two pairs of them."""
    ended = subprocess.run(
        [sys.executable, "-c", PAIRS_OF_RANKS, str(tmp_path), "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.stdout.split("\n") == ["[0, 0]"] * 2 + [""], ended.stderr


def test_machines_of_ranks_and_containers_count_and_must_have_as_many_ranks(monkeypatch):
    names = [("a", "host"), ("b", "host"), ("a", "host"), ("a", "container")]
    monkeypatch.setattr(processes, "on_all_ranks", lambda own: names)
    assert processes.find_machines() == [0, 1, 0, 2]
    assert [ranks_of_each(each) for each in ([0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3])] == [4, 2, 1]
    for machines in ([0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1]):
        with pytest.raises(UnsupportedError, match=r"numbered one after the other.*\[0, "):
            ranks_of_each(machines)


@pytest.mark.parametrize(
    ("backends", "fails", "destroyed"),
    [("cpu:gloo,cuda:nccl", False, 1), ("cpu:gloo,cuda:nccl", True, 0), ("cpu:gloo,cuda:gloo", False, 0)],
)
def test_the_group_is_destroyed_at_a_good_end(backends, fails, destroyed, monkeypatch):
    """Unless an error ends the process: other ranks may be gone then."""
    calls = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(1))
    monkeypatch.delattr(sys, "last_value", raising=False)
    if fails:
        monkeypatch.setattr(sys, "last_value", RuntimeError(), raising=False)
    processes.destroy_nccl_group()
    assert len(calls) == destroyed


def test_all_reduce_hooks_of_a_user_are_refused():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))
        refuse_other_cuts(model)
        model.set_all_reduce_hook(lambda grad: None)
        with pytest.raises(UnsupportedError, match="set_all_reduce_hook"):
            refuse_other_cuts(model)
    finally:
        dist.destroy_process_group()
