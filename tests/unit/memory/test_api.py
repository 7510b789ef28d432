import contextvars
import threading

import pytest
import torch
from torch import nn

from lightning_cxl.errors import ConfigError, TierNotFoundError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory import hook as scope
from lightning_cxl.memory.hook import empty, host_allocation, residency
from lightning_cxl.memory.host_memory import HostMemory
from lightning_cxl.memory.placement import Placer, TensorRole, tier
from lightning_cxl.native._numa import NOWHERE, page_nodes


def make_host(**budgets: int) -> tuple[HostMemory, Placer]:
    topology = Topology.detect()
    memory = HostMemory(topology, budgets={"dram": 2**26, "cxl": 2**26, **budgets})
    return memory, Placer(topology, memory.free_bytes)


@pytest.fixture
def memory():
    memory, placer = make_host()
    with scope.activate(memory, placer):
        yield memory
    memory.close()


def test_host_allocation_places_by_tier_role_and_policy(memory):
    with host_allocation(tier="dram"):
        by_tier = torch.ones(100)
    with host_allocation(role="momentum"):
        by_role = torch.ones(100)
    with host_allocation(role=TensorRole.ACTIVATIONS):
        by_enum = torch.ones(100)
    with host_allocation():
        by_policy = torch.ones(100)
    assert [residency(t) for t in (by_tier, by_role, by_enum, by_policy)] == [
        {"dram": 400},
        {"dram": 400},
        {"cxl": 400},
        {"cxl": 400},
    ]
    assert memory.stats()["roles"] == {
        "compute_weights": {"dram": 400, "cxl": 400},
        "momentum": {"dram": 400},
        "activations": {"cxl": 400},
    }


@pytest.mark.parametrize("call", [lambda **kw: host_allocation(**kw).__enter__(), lambda **kw: empty(3, **kw)])
def test_bad_names_are_refused_and_the_good_ones_named(memory, call):
    with pytest.raises(TierNotFoundError, match=r"'hbm'.*'dram', 'cxl'"):
        call(tier="hbm")
    with pytest.raises(ConfigError, match=r"'weights'.*'compute_weights'.*'staging'"):
        call(role="weights")
    assert memory.tier_at(torch.ones(100).data_ptr()) is None


def test_empty_gives_what_was_asked_for(memory):
    made = empty((3, 4), dtype=torch.int16, tier="dram", role="staging")
    made.fill_(7)
    assert made.shape == (3, 4) and made.dtype == torch.int16 and made.is_contiguous()
    assert residency(made) == {"dram": 24}
    assert memory.stats()["roles"] == {"staging": {"dram": 24}}
    assert empty(5).dtype == torch.get_default_dtype() and empty(5).shape == (5,)
    assert empty((2, 0)).numel() == 0 and residency(empty((2, 0))) == {}
    with pytest.raises(ValueError, match="shape"):
        empty((-1, 3))


def test_empty_obeys_the_policy_and_decorators(memory):
    @tier(weights="dram")
    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(empty(100).zero_())
            self.other = nn.Parameter(empty(100, tier="cxl").zero_())

    module = Decorated()
    assert residency(module.weight) == {"dram": 400}
    assert residency(module.other) == residency(empty(100).zero_()) == {"cxl": 400}


def test_residency_of_memory_that_is_not_ours(memory):
    plain = torch.ones(1000)
    assert residency(plain) == {"dram": 4000}
    assert residency(torch.ones(3, device="meta")) == {"meta": 12}


def test_the_innermost_scope_is_used_and_each_leaves_by_itself():
    (outer, outer_placer), (inner, inner_placer) = make_host(), make_host()
    first, second = scope.activate(outer, outer_placer), scope.activate(inner, inner_placer)
    first.__enter__()
    second.__enter__()
    assert scope.current().memory is inner
    first.__exit__(None, None, None)  # not in order
    assert scope.current().memory is inner
    second.__exit__(None, None, None)
    assert scope.current().memory not in (outer, inner)


def test_the_default_is_built_once_and_has_all_tiers():
    def check() -> None:
        default = scope.current()
        assert default is scope.current()
        made = empty(100, tier="cxl").zero_()
        assert default.memory.tier_at(made.data_ptr()).name == "cxl"
        assert residency(made) == {"cxl": 400}

    contextvars.Context().run(check)


def test_threads_start_without_the_active_scope(memory):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(scope.current().memory))
    thread.start()
    thread.join()
    assert seen[0] is not memory and scope.current().memory is memory


def test_a_forked_child_does_not_use_the_scope(memory, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert scope.current().memory is not memory


def backed_bytes(ranges: list[tuple[int, int]]) -> int:
    """Return how much of some address ranges has pages, as the kernel says."""
    found = [page_nodes(address, nbytes) for address, nbytes in ranges]
    return sum(size for nodes in found for node, size in nodes.items() if node != NOWHERE)


@pytest.mark.parametrize(("mib", "count"), [(1, 96), (96, 1)])
@pytest.mark.parametrize("options", [{}, {"role": "activations"}, {"role": "momentum"}])
def test_outside_of_a_run_memory_goes_back_to_the_kernel_with_its_tensor(options, mib, count):
    tensors = [empty((mib << 20,), torch.uint8, **options) for _ in range(count)]
    ranges = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    assert backed_bytes(ranges) == 96 << 20
    del tensors
    assert backed_bytes(ranges) <= 2 << 20  # other threads may have mapped something there meanwhile
