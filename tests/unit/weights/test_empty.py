import pytest
import torch
from torch import nn

from lightning_cxl.errors import ConfigError
from lightning_cxl.memory.hook import HostAllocationMode
from lightning_cxl.weights.load import empty_weights, refuse_unready
from tests.models import TinyConvNet, TinyTransformer
from tests.unit.memory.host import Host


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3), requires_grad=False)
        self.register_buffer("frequencies", 1.0 / torch.arange(1.0, 5.0), persistent=False)
        self.alias = self.weight
        both = nn.Parameter(torch.ones(2))
        both.role = "scale"
        self.one, self.two = both, both


def test_parameters_have_no_memory_and_buffers_are_real():
    with empty_weights():
        model = nn.ModuleList([TinyConvNet(), Rotary(), nn.LSTM(2, 3), nn.MultiheadAttention(4, 2)])
    assert all(p.is_meta and type(p) is nn.Parameter for p in model.parameters())
    reference = nn.ModuleList([TinyConvNet(), Rotary(), nn.LSTM(2, 3), nn.MultiheadAttention(4, 2)])
    for name, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    for name, parameter in reference.named_parameters():
        twin = model.get_parameter(name)
        assert (twin.shape, twin.dtype, twin.stride(), twin.requires_grad) == (
            parameter.shape, parameter.dtype, parameter.stride(), parameter.requires_grad,
        )  # fmt: skip


def test_ties_and_attributes_survive():
    with empty_weights():
        tied, rotary = TinyTransformer(tied=True), Rotary()
    assert tied.head.weight is tied.embed.weight
    assert rotary.alias is rotary.weight and rotary.one is rotary.two and rotary.one.role == "scale"
    assert not rotary.weight.requires_grad and rotary.weight.is_meta


def test_it_ends_with_the_region_also_after_an_error():
    with pytest.raises(KeyError), empty_weights():
        raise KeyError
    assert not nn.Linear(2, 2).weight.is_meta
    with empty_weights(), empty_weights():
        pass
    assert not nn.Linear(2, 2).weight.is_meta


def test_nothing_is_placed_that_is_thrown_away():
    host = Host()
    with host.mode(role=None), empty_weights():
        model = TinyTransformer()
        assert host.tier(torch.ones(100)) is None
    assert host.memory.stats()["tiers"]["dram"]["held_bytes"] == host.memory.stats()["tiers"]["cxl"]["held_bytes"] == 0
    assert all(p.is_meta for p in model.parameters())
    with host.mode() as mode:
        assert isinstance(mode, HostAllocationMode)
        assert host.tier(torch.ones(100)) is not None, "placing goes on afterwards"


def test_tensors_on_meta_are_refused_by_name():
    refuse_unready(TinyTransformer())
    refuse_unready(nn.LazyLinear(3))
    with empty_weights():
        model = TinyTransformer()
    with pytest.raises(ConfigError, match=r"of TinyTransformer are on the meta device.*`embed\.weight`.*load_weights"):
        refuse_unready(model)
    with torch.device("meta"):
        norm = nn.BatchNorm1d(3)
    norm.weight, norm.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match=r"3 of 5 tensors.*`running_mean`"):
        refuse_unready(norm)
