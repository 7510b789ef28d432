import copy
import io
import threading

import pytest
import torch
from torch import nn

from lightning_cxl.errors import TierFullError
from lightning_cxl.memory.placement import TensorRole, tier
from tests.unit.memory.host import LIMIT, Host, Net


@pytest.fixture
def host():
    made = Host()
    yield made
    made.memory.close()


def test_modules_keep_their_initial_values(host):
    torch.manual_seed(0)
    expected = Net()
    torch.manual_seed(0)
    with host.mode(role=TensorRole.COMPUTE_WEIGHTS):
        got = Net()
    for (name, left), right in zip(got.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
        assert host.tier(left) == "cxl", name  # home of weights
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in got.parameters())
    used = sum(value.numel() * value.element_size() for value in got.state_dict().values())
    assert sum(host.bytes_of(TensorRole.COMPUTE_WEIGHTS).values()) == used


def test_the_innermost_decorated_module_decides(host):
    @tier(weights="cxl")
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.randn(4) * 0.02)

    @tier(weights="dram", activations="cxl")
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(2, 2)
            self.inner = Inner()
            self.scale = nn.Parameter(torch.zeros(4) + 1)

    with host.mode():
        net = Outer()
        outside = torch.ones(3)
    where = {name: host.tier(value) for name, value in net.named_parameters()}
    assert where == {
        "scale": "dram",
        "before.weight": "dram",
        "before.bias": "dram",
        "inner.scale": "cxl",
        "inner.linear.weight": "cxl",
        "inner.linear.bias": "cxl",
    }
    assert host.tier(outside) == "cxl"


def test_of_tier_and_decorator_the_innermost_decides(host):
    @tier(weights="dram")
    class Decorated(nn.Module):
        def __init__(self, inner_tier: str | None = None) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            if inner_tier is not None:
                with host.mode(tier=inner_tier):
                    self.inner = nn.Parameter(torch.ones(3))
                    self.child = Decorated()

    with host.mode(tier="cxl"):
        net = Decorated("cxl")
        after = torch.ones(3)
    assert [host.tier(t) for t in (net.weight, net.inner, net.child.weight, after)] == ["dram", "cxl", "dram", "cxl"]


def test_a_parameter_made_from_a_view_still_shares_it(host):
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = torch.randn(4) * 2
            self.left = nn.Parameter(self.both[:2])

    with host.mode(role=TensorRole.COMPUTE_WEIGHTS):
        split = Split()
    assert split.left.data_ptr() == split.both.data_ptr()


def test_deepcopy_save_and_load(host):
    with host.mode(tier="cxl"):
        net = Net()
        copied = copy.deepcopy(net)
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    file.seek(0)
    outside = torch.load(file, weights_only=True)
    assert {host.tier(parameter) for parameter in copied.parameters()} == {"cxl"}
    for name, value in net.state_dict().items():
        assert torch.equal(value, copied.state_dict()[name])
        assert torch.equal(value, loaded[name]) and torch.equal(value, outside[name])
    net.load_state_dict(loaded, assign=True)
    copied.load_state_dict(outside)
    assert file.getbuffer().nbytes < 2 * sum(v.numel() * v.element_size() for v in loaded.values()) + 20000


def test_exceptions_end_the_mode_and_leak_nothing(host):
    with pytest.raises(KeyError), host.mode(tier="cxl"):
        kept = torch.ones(1000)
        raise KeyError(kept.shape)
    del kept
    assert host.tier(torch.ones(3)) is None
    with host.mode(tier="cxl"):
        with pytest.raises(RuntimeError, match="negative dimension"):
            torch.empty(-1)
        with pytest.raises(TierFullError, match="compute_weights"):
            torch.empty(2 * LIMIT)
        assert host.tier(torch.ones(3)) == "cxl"
    assert host.memory.stats()["tiers"]["cxl"]["used_bytes"] == 0


def test_other_threads_are_not_affected(host):
    inside: dict[str, str | None] = {}

    def without() -> None:
        inside["without"] = host.tier(torch.ones(3))

    def with_own() -> None:
        with host.mode(tier="dram"):
            inside["own"] = host.tier(torch.ones(3))

    with host.mode(tier="cxl"):
        for target in (without, with_own):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert host.tier(torch.ones(3)) == "cxl"
    assert inside == {"without": None, "own": "dram"}
