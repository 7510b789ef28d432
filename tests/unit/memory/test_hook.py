import copy
import os

import numpy as np
import pytest
import torch
from torch import nn

from lightning_cxl.memory.placement import TensorRole
from tests.unit.memory.host import Host


@pytest.fixture
def host():
    made = Host()
    yield made
    made.memory.close()


# -- factories -------------------------------------------------------------------------------------------------------

SOURCE = torch.arange(24.0).reshape(2, 3, 4)
IMAGE = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
FACTORIES = {
    "empty": lambda: torch.empty(3, 4),
    "empty_channels_last": lambda: torch.empty(2, 3, 4, 5, memory_format=torch.channels_last),
    "empty_strided_gaps": lambda: torch.empty_strided((3, 4), (8, 1)),
    "empty_like": lambda: torch.empty_like(IMAGE),
    "new_empty_strided": lambda: SOURCE.new_empty_strided((3, 4), (1, 3)),
    "Tensor": lambda: torch.Tensor(3, 4),
    "zeros": lambda: torch.zeros(3, 4),
    "zeros_like": lambda: torch.zeros_like(SOURCE, dtype=torch.float64),
    "zeros_like_transposed": lambda: torch.zeros_like(SOURCE.transpose(0, 2)),
    "zeros_like_expanded": lambda: torch.zeros_like(torch.arange(3).expand(4, 3)),
    "ones": lambda: torch.ones(3, 4, dtype=torch.bool),
    "full": lambda: torch.full((3, 4), 2.5),
    "full_like": lambda: torch.full_like(IMAGE, 3),
    "clone": lambda: SOURCE.clone(),
    "clone_expanded": lambda: SOURCE[0].expand(5, 3, 4).clone(),
    "clone_conjugate": lambda: torch.complex(SOURCE, -SOURCE).conj().clone(),
    "clone_negative_bit": lambda: torch.complex(SOURCE, -SOURCE).conj().imag.clone(),
    "contiguous": lambda: SOURCE.transpose(0, 1).contiguous(),
    "to_dtype": lambda: IMAGE.to(torch.float64),
    "to_memory_format": lambda: SOURCE.view(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "rand": lambda: torch.rand(3, 4),
    "rand_generator": lambda: torch.rand(3, 4, generator=torch.Generator().manual_seed(5)),
    "randn": lambda: torch.randn(100, dtype=torch.float64),
    "randn_like": lambda: torch.randn_like(SOURCE),
    "randperm": lambda: torch.randperm(17),
    "normal": lambda: torch.normal(1.0, 2.0, (3, 4)),
    "arange": lambda: torch.arange(7),
    "hann_window": lambda: torch.hann_window(9),
    "tensor": lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "tensor_numpy": lambda: torch.tensor(np.arange(5.0)),
    "FloatTensor": lambda: torch.FloatTensor([1, 2]),
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
    for question in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.is_conj, torch.Tensor.is_neg):
        assert question(got) == question(expected)
    assert (got.dtype, got.requires_grad) == (expected.dtype, expected.requires_grad)
    if "empty" not in name and name != "Tensor":
        assert torch.equal(got, expected)
    assert torch.equal(torch.get_rng_state(), state), "the stream of random numbers moved differently"
    got.zero_()  # an allocation that was never written has no pages yet
    assert host.memory.tier_at(got.data_ptr()).name == "cxl"
    if got.is_contiguous():
        assert host.tier(got) == "cxl"


def test_requires_grad_and_autograd_work(host):
    with host.mode(tier="cxl"):
        weight = torch.ones(4, requires_grad=True)
        made = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
        copied = made.clone()
        half = made.to(torch.float64)
        loss = (weight * copied).sum() + (half**2).sum()
    loss.backward()
    assert weight.is_leaf and made.is_leaf and copied.grad_fn is not None
    assert weight.grad.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert made.grad.tolist() == [3.0, 5.0, 7.0, 9.0]


# -- untouched -------------------------------------------------------------------------------------------------------


def test_tensors_without_elements_stay_resizable(host):
    with host.mode(tier="cxl"):
        for made in (torch.empty(0), torch.zeros(3, 0), torch.tensor([]), SOURCE[:0].clone(), torch.rand(0)):
            assert host.tier(made) is None
            made.resize_(10)


def test_views_and_out_variants_are_left_alone(host):
    base, target = torch.ones(6), torch.empty(6)
    with host.mode(tier="cxl", role=TensorRole.COMPUTE_WEIGHTS):
        views = [base[1:], base.view(2, 3), base.detach(), base.expand(2, 6), base.to("cpu"), base.contiguous()]
        assert torch.add(base, base, out=target) is target
        torch.arange(6, out=target)
    assert all(view.untyped_storage().data_ptr() == base.data_ptr() for view in views)
    assert host.tier(target) is None


def test_memory_shared_with_others_stays_shared(host):
    array, data = np.zeros(3, dtype=np.float32), bytearray(12)
    with host.mode(tier="cxl", role=TensorRole.COMPUTE_WEIGHTS):
        shared = [torch.from_numpy(array), torch.as_tensor(array), torch.asarray(array)]
        shared += [torch.frombuffer(data, dtype=torch.float32), torch.from_dlpack(SOURCE)]
    array[:] = 5
    assert [tensor[0].item() for tensor in shared[:3]] == [5.0] * 3
    data[:4] = np.float32(7).tobytes()
    assert shared[3][0] == 7 and shared[4].data_ptr() == SOURCE.data_ptr()


def test_a_mapped_file_stays_mapped(host, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(12))
    with host.mode(tier="cxl", role=TensorRole.COMPUTE_WEIGHTS):
        mapped = torch.from_file(str(path), shared=True, size=3)
        mapped.fill_(1.0)
    assert path.read_bytes() == np.ones(3, dtype=np.float32).tobytes()


def test_other_devices_are_left_alone(host):
    fake = torch._subclasses.FakeTensorMode()
    with host.mode(tier="cxl"):
        made = [torch.empty(3, device="meta"), torch.zeros_like(SOURCE, device="meta"), SOURCE.to("meta")]
        with torch.device("meta"):
            made += [torch.ones(3), nn.Linear(3, 4).weight]
        assert all(tensor.is_meta for tensor in made)
        with fake:
            gpu = torch.ones(3, device="cuda")
            assert [gpu.clone().device.type, torch.zeros_like(gpu).device.type, gpu.to("cpu").device.type] == [
                "cuda",
                "cuda",
                "cpu",
            ]
            assert isinstance(gpu.to("cpu"), torch._subclasses.FakeTensor)
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            made[0].to("cpu")
    assert host.bytes_of(TensorRole.COMPUTE_WEIGHTS) == {}


def test_other_layouts_and_subclasses_are_left_alone(host):
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


def test_arithmetic_is_left_alone(host):
    with host.mode(tier="cxl"):
        assert host.tier(SOURCE + SOURCE) is None


def test_a_forked_child_allocates_as_if_there_were_no_hook(host):
    with host.mode(tier="cxl"):
        torch.ones(3)
        pid = os.fork()
        if pid == 0:  # pragma: no cover
            fine = bool((torch.zeros(100) == 0).all()) and torch.ones(5).untyped_storage().resizable()
            os._exit(0 if fine else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- pinned ----------------------------------------------------------------------------------------------------------


def test_pin_memory_asks_for_page_locked_memory(host):
    with host.mode(tier="cxl"):
        torch.ones(3)
        assert not host.pinned
        made = torch.ones(3, pin_memory=True)
        assert len(host.pinned) == 1
        drawn = torch.rand(2**23, pin_memory=True)  # larger than the pool's slab
        copied = IMAGE.pin_memory()
        like = torch.zeros_like(SOURCE, pin_memory=True)
    assert len(host.pinned) == 2
    assert [host.tier(tensor) for tensor in (made, drawn, like)] == ["cxl"] * 3
    assert torch.equal(copied, IMAGE) and copied.stride() == IMAGE.stride()
