import copy

import pytest
import torch
from torch import nn

from lightning_cxl.devices import make_engine
from lightning_cxl.sharding.host_shard import HostShard
from tests import apart

pytestmark = pytest.mark.usefixtures("on_apart")


@pytest.fixture
def on_apart(on_device):
    if on_device.type != "apart":
        pytest.skip("counts copies")
    return on_device


@pytest.fixture
def values():
    return torch.arange(12.0).view(4, 3)


@pytest.fixture
def shard(on_apart, values):
    return HostShard(values.clone().pin_memory(), make_engine(on_apart))


@pytest.fixture
def copies():
    """Tells how many bytes have gone to the device in the test."""
    before = apart.counters()["h2d_bytes"]
    return lambda: apart.counters()["h2d_bytes"] - before


def test_it_looks_like_a_tensor_of_the_device_and_gives_values_there(shard, on_apart, values):
    assert (shard.device, shard.shape, shard.stride()) == (on_apart, values.shape, values.stride())
    assert not shard.is_pinned()
    for read in (shard + 0, shard.clone(), copy.deepcopy(shard), shard.to(torch.float64), shard[1:, :2] * 1):
        assert type(read) is torch.Tensor and read.device == on_apart
    assert torch.equal((shard[1:, :2] * 2).cpu(), values[1:, :2] * 2)
    assert shard[2, 1].item() == 7


def test_what_needs_no_value_on_the_device_copies_nothing_there(shard, values, copies, on_apart):
    for read in (shard.cpu(), shard.to("cpu", torch.bfloat16), torch.zeros(4, 3).copy_(shard), shard.view(-1).cpu()):
        assert torch.equal(read.flatten(), values.flatten().to(read.dtype))
    assert copies() == 0
    assert shard.cpu().data_ptr() != shard.host.data_ptr()
    for made in (torch.zeros_like(shard), torch.empty_like(shard), shard.new_zeros(2), shard.new_full((2,), 3.0)):
        assert type(made) is torch.Tensor and made.device == on_apart
    assert torch.empty_like(shard, device="cpu").is_cpu
    assert copies() == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.fill_(2),
        lambda t: t.copy_(torch.ones(4, 3, dtype=torch.bfloat16)),
        lambda t: t.copy_(torch.ones(4, 3, device="apart")),
        lambda t: t.add_(torch.ones(4, 3, device="apart"), alpha=-0.5),
        lambda t: t.view(-1)[2:5].mul_(3),
        lambda t: t.narrow(0, 1, 2).copy_(torch.zeros(2, 3)),
        lambda t: t.split(2)[1].zero_(),
        lambda t: t.__setitem__(0, 5.0),
        lambda t: nn.init.constant_(t, 4),
        lambda t: torch._foreach_mul_([t], 2),
        lambda t: torch.add(t, 1, out=t),
    ],
)
def test_writes_change_the_bytes_on_the_host(shard, values, write):
    write(shard)
    there = values.to("apart")
    write(there)
    assert torch.equal(shard.host, there.cpu())
    assert not torch.equal(shard.host, values)


def test_an_operator_that_writes_to_the_device_as_well_does_both(shard, values):
    there = torch.zeros(4, 3, device="apart")
    torch._foreach_copy_([there, shard], [shard, there + 1])
    assert torch.equal(there.cpu(), values)
    assert torch.equal(shard.host, torch.ones(4, 3))


def test_a_write_waits_for_copies_that_read(shard, values):
    apart.set_delay(h2d=0.05)
    arrived = shard.view(-1) + 0
    shard.fill_(9)
    assert torch.equal(arrived.cpu(), values.flatten())
    assert (shard.host == 9).all()
