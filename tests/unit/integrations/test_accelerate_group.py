"""The process group of Accelerate's processes has a backend for what is on the host, beside NCCL."""

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
    ("handlers", "asked"),
    [
        ([], {"backend": "cpu:gloo,cuda:nccl"}),
        (
            [InitProcessGroupKwargs(timeout=timedelta(hours=2))],
            {"backend": "cpu:gloo,cuda:nccl", "timeout": timedelta(hours=2)},
        ),
        ([InitProcessGroupKwargs(backend="cpu:mpi,cuda:nccl")], {"backend": "cpu:mpi,cuda:nccl"}),
    ],
)
def test_it_is_asked_for(launched, handlers, asked):
    with pytest.raises(Asked) as error:
        CXLAccelerator(kwargs_handlers=handlers)
    assert {**error.value.args[0], **asked} == error.value.args[0]


def test_a_process_that_is_alone_asks_for_none(launched, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "-1")
    assert accelerate.with_gloo({"a": 1}) == {"a": 1}


def test_processes_on_the_cpu_have_gloo_alone(launched):
    with pytest.raises(Asked) as error:
        CXLAccelerator(cpu=True)
    assert error.value.args[0]["backend"] == "gloo"


@pytest.mark.parametrize(("backends", "refused"), [("cuda:nccl", True), ("cpu:mpi,cuda:nccl", False)])
def test_a_group_without_one_is_refused(monkeypatch, backends, refused):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.MULTI_GPU, num_processes=2, device=torch.device("cuda", 0)
    )
    try:
        accelerate.CXLAccelerator._check_processes(accelerator)
    except UnsupportedError as error:
        assert refused and 'TrainingArguments(ddp_backend="cpu:gloo,cuda:nccl")' in str(error)
    else:
        assert not refused
