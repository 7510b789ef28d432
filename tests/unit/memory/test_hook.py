import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from lightning_cxl.errors import ConfigError, TierFullError, TierNotFoundError
from lightning_cxl.memory import hook as scope
from lightning_cxl.memory.hook import empty, host_allocation, is_placing, ordinary_memory, residency
from lightning_cxl.memory.placement import TensorRole, TierSpec, constructing, constructing_spec, tier
from lightning_cxl.native._numa import NOWHERE, page_nodes
from tests.unit.memory.host import LIMIT, Host, ends_in_child


@pytest.fixture
def host():
    made = Host()
    yield made
    made.memory.close()


@pytest.fixture
def run(host):
    with scope.activate(host.memory, host.placer):
        yield host


SOURCE = torch.arange(24.0).reshape(2, 3, 4)
IMAGE = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
FACTORIES = {
    "empty_strided_gaps": lambda: torch.empty_strided((3, 4), (8, 1)),
    "empty_like": lambda: torch.empty_like(IMAGE),
    "zeros": lambda: torch.zeros(3, 4),
    "zeros_like_expanded": lambda: torch.zeros_like(torch.arange(3).expand(4, 3), dtype=torch.float64),
    "ones": lambda: torch.ones(3, 4, dtype=torch.bool),
    "full_like": lambda: torch.full_like(IMAGE, 3),
    "clone_expanded": lambda: SOURCE[0].expand(5, 3, 4).clone(),
    "clone_conjugate": lambda: torch.complex(SOURCE, -SOURCE).conj().clone(),
    "contiguous": lambda: SOURCE.transpose(0, 1).contiguous(),
    "to_dtype": lambda: IMAGE.to(torch.float64),
    "to_memory_format": lambda: SOURCE.view(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "rand_generator": lambda: torch.rand(3, 4, generator=torch.Generator().manual_seed(5)),
    "randperm": lambda: torch.randperm(17),
    "normal": lambda: torch.normal(1.0, 2.0, (3, 4)),
    "arange": lambda: torch.arange(7),
    "tensor": lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "tensor_numpy": lambda: torch.tensor(np.arange(5.0)),
    "deepcopy": lambda: copy.deepcopy(nn.Parameter(IMAGE, requires_grad=False)).data,
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_gives_the_same_tensor_on_the_tier(host, name):
    make = FACTORIES[name]
    torch.manual_seed(0)
    expected = make()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with host.mode(tier="cxl"):
        got = make()
    assert type(got) is torch.Tensor
    for question in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.is_conj):
        assert question(got) == question(expected)
    assert (got.dtype, got.requires_grad) == (expected.dtype, expected.requires_grad)
    if "empty" not in name:
        assert torch.equal(got, expected)
    assert torch.equal(torch.get_rng_state(), state), "the stream of random numbers moved differently"
    got.zero_()  # an allocation that was never written has no pages yet
    assert host.memory.tier_at(got.data_ptr()).name == "cxl"
    if got.is_contiguous():
        assert host.tier(got) == "cxl"


def test_what_is_no_host_tensor_with_elements_is_left_alone(host):
    with host.mode(tier="cxl"):
        for made in (torch.empty(0), torch.zeros(3, 0), torch.tensor([]), SOURCE[:0].clone(), torch.rand(0)):
            assert host.tier(made) is None
            made.resize_(10)
    fake = torch._subclasses.FakeTensorMode()
    with host.mode(tier="cxl"):
        made = [torch.empty(3, device="meta"), torch.zeros_like(SOURCE, device="meta"), SOURCE.to("meta")]
        with torch.device("meta"):
            made += [torch.ones(3), nn.Linear(3, 4).weight]
        assert all(tensor.is_meta for tensor in made)
        with fake:
            gpu = torch.ones(3, device="cuda")
            assert gpu.clone().device.type == torch.zeros_like(gpu).device.type == "cuda"
            assert isinstance(gpu.to("cpu"), torch._subclasses.FakeTensor) and gpu.to("cpu").is_cpu
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            made[0].to("cpu")
    assert host.bytes_of(TensorRole.COMPUTE_WEIGHTS) == {}

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return torch.full((2,), 9.0)

    wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, (2,))
    with host.mode(tier="cxl"):
        sparse = torch.empty(2, 2, layout=torch.sparse_coo)
        copied = torch.eye(3).to_sparse().clone()
        answered = wrapped.clone()
    assert sparse.layout is copied.layout is torch.sparse_coo
    assert torch.equal(copied.to_dense(), torch.eye(3))
    assert answered.tolist() == [9.0, 9.0]


def test_a_forked_child_allocates_as_if_there_were_no_hook(host):
    with host.mode(tier="cxl"):
        torch.ones(3)
        assert ends_in_child(lambda: not torch.zeros(100).any() and torch.ones(5).untyped_storage().resizable()) == 0


def test_views_results_and_shared_memory_are_left_alone(host, tmp_path):
    base, target, path = torch.ones(6), torch.empty(6), tmp_path / "data"
    array, data = np.zeros(3, dtype=np.float32), bytearray(12)
    path.write_bytes(bytes(12))
    with host.mode(tier="cxl"):
        assert host.tier(SOURCE + SOURCE) is None, "arithmetic"
    with host.mode(tier="cxl", role=TensorRole.COMPUTE_WEIGHTS):
        views = [base[1:], base.view(2, 3), base.detach(), base.expand(2, 6), base.to("cpu"), base.contiguous()]
        assert torch.add(base, base, out=target) is target
        torch.arange(6, out=target)
        shared = [torch.from_numpy(array), torch.as_tensor(array), torch.asarray(array)]
        shared += [torch.frombuffer(data, dtype=torch.float32), torch.from_dlpack(SOURCE)]
        torch.from_file(str(path), shared=True, size=3).fill_(1.0)
    assert all(view.untyped_storage().data_ptr() == base.data_ptr() for view in views)
    assert host.tier(target) is None
    array[:] = 5
    data[:4] = np.float32(7).tobytes()
    assert [tensor[0].item() for tensor in shared[:4]] == [5.0, 5.0, 5.0, 7.0]
    assert shared[4].data_ptr() == SOURCE.data_ptr()
    assert path.read_bytes() == np.ones(3, dtype=np.float32).tobytes()


def test_pin_memory_asks_for_page_locked_memory(host):
    with host.mode(tier="cxl"):
        torch.ones(3)
        assert not host.pinned
        made = torch.ones(3, pin_memory=True)
        assert len(host.pinned) == 1
        drawn = torch.rand(2**23, pin_memory=True)  # larger than the pool's slab
        copied, like = IMAGE.pin_memory(), torch.zeros_like(SOURCE, pin_memory=True)
    assert len(host.pinned) == 2
    assert [host.tier(tensor) for tensor in (made, drawn, like)] == ["cxl"] * 3
    assert torch.equal(copied, IMAGE) and copied.stride() == IMAGE.stride()


def test_modules_keep_their_initial_values_and_share_what_is_a_view(host):
    torch.manual_seed(0)
    expected = make_modules().state_dict()
    torch.manual_seed(0)
    with host.mode(role=TensorRole.COMPUTE_WEIGHTS):
        modules = make_modules()
    for name, value in modules.state_dict().items():
        assert torch.equal(value, expected[name]) and host.tier(value) == "cxl", name  # home of weights
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in modules.parameters())
    assert host.bytes_of(TensorRole.COMPUTE_WEIGHTS) == {"cxl": sum(value.nbytes for value in expected.values())}
    with host.mode(role=TensorRole.COMPUTE_WEIGHTS):
        both = torch.randn(4) * 2
        left = nn.Parameter(both[:2])
    assert left.data_ptr() == both.data_ptr()


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
            self.empty = nn.Parameter(empty(100).zero_())
            self.far = nn.Parameter(empty(100, tier="cxl").zero_())

    with host.mode(), scope.activate(host.memory, host.placer):
        model, outside = Outer(), torch.ones(3)
    for name, value in model.named_parameters():
        assert host.tier(value) == ("cxl" if name.startswith("inner.") or name == "far" else "dram"), name
    assert host.tier(outside) == "cxl"


def test_exceptions_and_pauses_end_and_leak_nothing(host):
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
    with host.mode():
        with ordinary_memory():
            assert not is_placing()
            with ordinary_memory():
                pass
            assert host.tier(torch.ones(9)) is None and host.tier(torch.ones(9).clone()) is None
        assert is_placing() and host.tier(torch.ones(9)) == "cxl"
        with pytest.raises(KeyError), ordinary_memory():
            raise KeyError
        assert is_placing()
    assert not is_placing()


def make_modules():
    kinds = (nn.Embedding(5, 6, padding_idx=0), nn.Conv2d(2, 3, 3), nn.BatchNorm1d(4), nn.LSTM(4, 4))
    return nn.ModuleList([*kinds, nn.MultiheadAttention(4, 2)])


def in_a_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def test_other_threads_are_not_affected(run):
    def with_own() -> str | None:
        with run.mode(tier="dram"):
            return run.tier(torch.ones(3))

    with run.mode(tier="cxl"), constructing(TierSpec(weights="dram")):
        assert in_a_thread(lambda: run.tier(torch.ones(3))) is None and in_a_thread(with_own) == "dram"
        assert in_a_thread(constructing_spec) is None
        assert in_a_thread(lambda: scope.current().memory) is not run.memory
        assert constructing_spec() == TierSpec(weights="dram") and scope.current().memory is run.memory
        with constructing(None):
            assert constructing_spec() is None
    assert constructing_spec() is None


def test_host_allocation_places_by_tier_role_and_policy(run):
    cases = [({"tier": "dram"}, "dram"), ({"role": "momentum"}, "dram"), ({"role": TensorRole.ACTIVATIONS}, "cxl")]
    for options, tier_name in [*cases, ({}, "cxl")]:
        with host_allocation(**options):
            made = torch.ones(100)
        assert residency(made) == {tier_name: 400}
    peaks = run.memory.stats()["peak_roles"]
    assert (peaks["momentum"], peaks["activations"]) == ({"dram": 400}, {"cxl": 400})
    with pytest.raises(TierNotFoundError, match=r"'hbm'.*'dram', 'cxl'"), host_allocation(tier="hbm"):
        pass
    with pytest.raises(ConfigError, match=r"'weights'.*'compute_weights'.*'staging'"), host_allocation(role="weights"):
        pass
    assert run.tier(torch.ones(100)) is None


def test_empty_gives_what_was_asked_for(run):
    made = empty((3, 4), dtype=torch.int16, tier="dram", role="staging")
    made.fill_(7)
    assert made.shape == (3, 4) and made.dtype == torch.int16 and made.is_contiguous()
    assert residency(made) == {"dram": 24} and run.bytes_of(TensorRole.STAGING) == {"dram": 24}
    assert empty(5).dtype == torch.get_default_dtype() and empty(5).shape == (5,)
    assert empty((2, 0)).shape == (2, 0) and residency(empty((2, 0))) == {} and residency(empty(())) == {"cxl": 4}
    assert residency(torch.ones(1000)) == {"dram": 4000}, "memory that is not ours"
    assert residency(torch.ones(3, device="meta")) == {"meta": 12}
    with pytest.raises(TierNotFoundError, match=r"'hbm'.*'dram', 'cxl'"):
        empty(3, tier="hbm")


def test_the_innermost_scope_is_used_and_each_leaves_by_itself(monkeypatch):
    outer, inner = Host(), Host()
    first, second = (scope.activate(host.memory, host.placer) for host in (outer, inner))
    first.__enter__()
    second.__enter__()
    assert scope.current().memory is inner.memory
    first.__exit__(None, None, None)  # not in order
    assert scope.current().memory is inner.memory
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        assert scope.current().memory is not inner.memory, "a forked child"
    second.__exit__(None, None, None)
    default = scope.current()
    assert default.memory not in (outer.memory, inner.memory) and default is scope.current()
    made = empty(100, tier="cxl").zero_()
    assert default.memory.tier_at(made.data_ptr()).name == "cxl" and residency(made) == {"cxl": 400}


def backed_bytes(ranges: list[tuple[int, int]]) -> int:
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
