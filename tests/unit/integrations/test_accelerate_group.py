from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType
from accelerate.utils import InitProcessGroupKwargs

from lightning_cxl.accelerate import CXLAccelerator
from lightning_cxl.errors import UnsupportedError
from lightning_cxl.integrations import accelerate


class Asked(Exception):
    """Torch has been asked for a process group."""


@pytest.fixture
def launched(monkeypatch):
    """Processes that a launcher has started on GPUs, up to the moment when they would meet."""

    def init_process_group(**options):
        raise Asked(options)

    cuda = SimpleNamespace(name="cuda", num_devices=lambda: 1)
    monkeypatch.setattr(accelerate, "process_device_type", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    launcher = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "1"}
    for name, value in {**launcher, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {"backend": "cpu:gloo,cuda:nccl"}),
        ({"timeout": timedelta(hours=2)}, {"backend": "cpu:gloo,cuda:nccl", "timeout": timedelta(hours=2)}),
        ({"backend": "cpu:mpi,cuda:nccl"}, {"backend": "cpu:mpi,cuda:nccl"}),
        ({"cpu": True}, {"backend": "gloo"}),
    ],
)
def test_it_is_asked_for_where_a_gpu_computes(launched, options, asked):
    given = {"cpu": True} if "cpu" in options else {"kwargs_handlers": [InitProcessGroupKwargs(**options)]}
    with pytest.raises(Asked) as error:
        CXLAccelerator(**(given if options else {}))
    assert {**error.value.args[0], **asked} == error.value.args[0]


def test_a_process_that_is_alone_asks_for_none_and_a_group_without_one_is_refused(launched, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "-1")
    assert accelerate.with_gloo({"a": 1}) == {"a": 1}
    gpu = torch.device("cuda", 0)
    several = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, num_processes=2, device=gpu)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:mpi,cuda:nccl")
    CXLAccelerator._check_processes(several)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(UnsupportedError, match=r'TrainingArguments\(ddp_backend="cpu:gloo,cuda:nccl"\)'):
        CXLAccelerator._check_processes(several)
