"""A process with NCCL destroys its group at its end, unless an error ends it: other ranks may be gone then."""

import sys

import pytest
import torch.distributed as dist

from lightning_cxl.sharding import processes


@pytest.mark.parametrize(
    ("backends", "fails", "destroyed"),
    [("cpu:gloo,cuda:nccl", False, 1), ("cpu:gloo,cuda:nccl", True, 0), ("cpu:gloo,cuda:gloo", False, 0)],
)
def test_the_group_is_destroyed_at_a_good_end(backends, fails, destroyed, monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(1))
    monkeypatch.delattr(sys, "last_value", raising=False)
    if fails:
        monkeypatch.setattr(sys, "last_value", RuntimeError(), raising=False)
    processes.destroy_nccl_group()
    assert len(calls) == destroyed
