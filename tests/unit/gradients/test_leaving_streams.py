"""Which gradients are taken for memory of the stream that starts their copy."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cxl.gradients.offload import Gradient, LeavingGradients
from lightning_cxl.transfer.engine import HostEngine


@pytest.fixture
def four_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class Engine(HostEngine):
    """Notes what callers say of the memory of their sources."""

    def __init__(self):
        self.from_here = []

    def d2h_all(self, copies, *, after=None, from_here=False):
        self.from_here.append(from_here)
        return super().d2h_all(copies, after=after)


class Sums:
    """Memory for gradients, which nothing is added to."""

    def new(self, pairs, dtypes):
        return [torch.empty(2, dtype=dtype) for dtype in dtypes]

    def fold(self, landed):
        pass


@pytest.mark.usefixtures("four_ranks")
def test_gradients_that_machines_reduce_are_of_another_stream():
    """FSDP2 allocates them on the stream that scatters, and calls hooks on the one that reduces over machines."""
    engine = Engine()
    leaving = LeavingGradients(engine, None, Sums(), None)
    shard = torch.ones(2)
    of_one = DTensor.from_local(shard, init_device_mesh("cpu", (4,)), [Shard(0)])
    of_machines = DTensor.from_local(shard, init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)])
    for weight in (shard, of_one, of_machines):
        pair = SimpleNamespace(compute=weight, grad_dtype=torch.float32)
        leaving.add(Gradient(pair, torch.ones(2), key=0, is_first=True), unit=None, unit_size=1)
        leaving.settle()
    assert engine.from_here == [True, True, False]
