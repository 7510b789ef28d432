import copy

import pytest
import torch
from torch import nn

from lightning_cxl.memory.lineage import ParameterOwners
from lightning_cxl.placement.decorators import TierSpec
from lightning_cxl.placement.placement import TensorRole
from tests.unit.memory.host import Host


@pytest.fixture
def host():
    made = Host()
    yield made
    made.memory.close()


def make_owned(host):
    """Two parameters whose modules ask for different tiers; also what plain torch makes of them."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))]
    plain = copy.deepcopy(parameters)
    owners = ParameterOwners(
        [
            (parameters[0], TierSpec(optimizer_state="cxl")),
            (parameters[1], TierSpec(optimizer_state="dram", weights="cxl")),
            (parameters[2], None),
        ]
    )
    return parameters, plain, owners


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD_decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, maximize=True),
    "SGD_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW_foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_goes_where_the_module_of_its_parameter_asks(host, name):
    parameters, plain, owners = make_owned(host)
    optimizer, expected = OPTIMIZERS[name](parameters), OPTIMIZERS[name](plain)
    for _ in range(3):
        for p, q in zip(parameters, plain, strict=True):
            p.grad = torch.sin(p.detach())
            q.grad = torch.sin(q.detach())
        with host.mode(owners, role=TensorRole.MOMENTUM):
            optimizer.step()
        expected.step()
    for p, q, name in zip(parameters, plain, ("cxl", "dram", "dram"), strict=True):  # the last one: the role's home
        assert torch.equal(p, q)
        state = [value for value in optimizer.state[p].values() if torch.is_tensor(value) and value.ndim]
        assert state and {host.tier(value) for value in state} == {name}
    assert set(host.bytes_of(TensorRole.MOMENTUM)) <= {"cxl", "dram"}


def test_without_a_role_what_is_made_like_a_parameter_is_its_optimizer_state(host):
    parameters, _, owners = make_owned(host)
    with host.mode(owners):
        state = [torch.zeros_like(parameters[1]), parameters[1].new_zeros(5, 3)]
        copied = copy.deepcopy(parameters[1])
    assert [host.tier(tensor) for tensor in state] == ["dram", "dram"]
    assert host.tier(copied) == "cxl", "a copy of a parameter is a weight"
    assert host.bytes_of(TensorRole.MOMENTUM) == {"dram": 120}
    assert host.bytes_of(TensorRole.COMPUTE_WEIGHTS) == {"cxl": 60}


def test_other_operators_of_a_step_are_not_mistaken_for_state(host):
    parameters, _, owners = make_owned(host)
    with host.mode(owners, role=TensorRole.MOMENTUM), torch.no_grad():
        scalar = parameters[0].sum()
        torch.frexp(scalar), parameters[0].max(dim=0), torch.stack(parameters[:2]), torch._foreach_norm(parameters)
        assert host.tier(torch.zeros_like(parameters[0].T)) == "cxl"
        assert host.tier(torch.zeros_like(parameters[2] + 1)) == "dram"


def test_an_explicit_tier_beats_the_owner(host):
    parameters, _, owners = make_owned(host)
    with host.mode(owners, tier="cxl", role=TensorRole.MOMENTUM):
        assert host.tier(torch.zeros_like(parameters[1])) == "cxl"


def test_owners_follow_memory_and_forget_what_is_gone():
    parameter = nn.Parameter(torch.ones(4))
    spec = TierSpec(optimizer_state="cxl")
    owners = ParameterOwners([(parameter, spec)])
    assert owners(parameter) is owners(parameter.detach()) is spec
    assert owners(torch.ones(4)) is None and owners(torch.ones(5)) is None and owners("no tensor") is None
    parameter.grad = torch.ones(4)
    old = parameter.grad
    assert owners(old.detach()) is spec
    parameter.grad = torch.zeros(4)
    assert owners(old) is None and owners(parameter.grad) is spec
    weights = parameter.data
    parameter.data = torch.zeros(4)
    assert owners(weights) is None and owners(parameter) is spec
    later = nn.Parameter(torch.ones(9))
    owners.add(later, spec)
    assert owners(later) is spec
