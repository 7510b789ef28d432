"""Operators: the same values as on the CPU, and what CUDA refuses is refused."""

import pytest
import torch
from torch.nn import functional as F

from tests import apart


def both(f, *args):
    """The results of f on the CPU and on the device, as lists of tensors on the CPU."""
    results = []
    for device in ("cpu", "apart"):
        out = f(*(a.to(device) if isinstance(a, torch.Tensor) else a for a in args))
        out = out if isinstance(out, tuple) else (out,)
        if device == "apart":
            assert all(t.device.type == "apart" for t in out)
        results.append([t.cpu() for t in out])
    return results


x = torch.linspace(-2, 2, 24).reshape(4, 6)
whole = torch.tensor([[3, 0, 1], [2, 2, 0]])
SAME = {
    "add": lambda a: a + 1,
    "matmul": lambda a: a @ a.t(),
    "softmax": lambda a: a.softmax(-1),
    "gelu": F.gelu,
    "layer_norm": lambda a: F.layer_norm(a, (6,)),
    "layer_norm_bfloat16": lambda a: F.layer_norm(a.bfloat16(), (6,)),
    "sum": lambda a: a.sum(0, keepdim=True),
    "max": lambda a: tuple(a.max(1)),
    "sort": lambda a: tuple(a.sort(1, descending=True)),
    "topk": lambda a: tuple(a.topk(2)),
    "cumsum": lambda a: a.cumsum(1),
    "where": lambda a: torch.where(a > 0, a, 0.0),
    "cat": lambda a: torch.cat([a, a * 2], 1),
    "split": lambda a: a.split(2, 1),
    "transposed": lambda a: a.t().contiguous(),
    "strided": lambda a: a[::2, 1::2].clone(),
    "masked": lambda a: a[a > 0],
    "nonzero": lambda a: (a > 0).nonzero(),
    "unique": lambda a: a.round().unique(),
    "tril": torch.tril,
    "logsumexp": lambda a: a.logsumexp(1),
    "norm": torch.linalg.vector_norm,
    "bfloat16": lambda a: a.bfloat16() * 3,
    "complex": lambda a: torch.view_as_real(torch.view_as_complex(a.reshape(4, 3, 2)) * 1j),
    "conjugate": lambda a: torch.view_as_complex(a.reshape(4, 3, 2)).conj().resolve_conj(),
    "unfold": lambda a: a.unfold(1, 3, 2).contiguous(),
    "mse": lambda a: F.mse_loss(a, a * 2),
    "attention": lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None], is_causal=True),
    "addmm": lambda a: torch.addmm(a[:, :4], a, a.t()),
    "einsum": lambda a: torch.einsum("ij,kj->ik", a, a),
    "interpolate": lambda a: F.interpolate(a[None], scale_factor=2),
    "foreach": lambda a: tuple(torch._foreach_add([a, a], 1)),
}


@pytest.mark.parametrize("name", SAME)
def test_values_are_those_of_the_cpu(name):
    expected, found = both(SAME[name], x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


CONVOLUTIONS = {
    "conv1d": (F.conv1d, (2, 4, 9), (6, 2, 3), {"groups": 2, "padding": 1}),
    "conv1d_depthwise": (F.conv1d, (2, 4, 9), (4, 1, 3), {"groups": 4}),
    "conv2d": (F.conv2d, (2, 3, 8, 8), (4, 3, 3, 3), {"stride": 2}),
    "conv3d": (F.conv3d, (1, 2, 4, 4, 4), (3, 2, 2, 2, 2), {}),
    "conv_transpose1d": (F.conv_transpose1d, (2, 4, 5), (4, 3, 3), {"stride": 2}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_forward_and_backward(name, bias):
    conv, size, kernel, options = CONVOLUTIONS[name]
    torch.manual_seed(0)
    data, weight = torch.randn(size), torch.randn(kernel)
    channels = kernel[1] if "transpose" in name else kernel[0]

    def run(data, weight, offset):
        leaves = [t.requires_grad_() for t in (data, weight)] + ([offset.requires_grad_()] if bias else [])
        out = conv(data, weight, offset if bias else None, **options)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    expected, found = both(run, data, weight, torch.randn(channels))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_convolution_is_not_waited_for():
    conv = torch.nn.Conv1d(4, 4, 3, device="apart")
    data = torch.randn(1, 4, 9, device="apart")
    with apart.paused(torch.accelerator.current_stream()):
        conv(data).sum().backward()
        assert not torch.accelerator.current_stream().query()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_histograms(dtype):
    found = torch.histc(whole.to("apart", dtype), bins=4, min=0, max=3)
    assert found.dtype == dtype
    assert found.tolist() == [2, 1, 2, 1]


def test_bincount():
    expected, found = both(lambda t: torch.bincount(t.flatten(), minlength=6), whole)
    assert torch.equal(found[0], expected[0])


def test_results_go_into_given_tensors():
    a = torch.ones(3, device="apart")
    out = torch.empty(3, device="apart")
    assert torch.add(a, 1, out=out) is out
    assert out.tolist() == [2, 2, 2]
    late = torch.empty(0, dtype=torch.int64, device="apart")
    torch.nonzero(a, out=late)
    assert late.tolist() == [[0], [1], [2]]


# ---- tensors of the host in calls


def device_tensor():
    return torch.arange(12.0, device="apart").reshape(4, 3)


host_index = torch.tensor([0, 2])
ALLOWED = {
    "a number": lambda t: t * torch.tensor(2.0),
    "a number to fill with": lambda t: t.masked_fill(t > 1, torch.tensor(2.0)),
    "a number in where": lambda t: torch.where(t > 1, t, torch.tensor(0.0)),
    "indices in brackets": lambda t: t[host_index],
    "a mask in brackets": lambda t: t[torch.tensor([True, False, True, False])],
    "a number put by indices": lambda t: t.index_put((host_index,), torch.tensor(5.0)),
}
REFUSED = {
    "a tensor": lambda t: t + torch.ones(3),
    "a tensor of one element": lambda t: t + torch.ones(1),
    "a matrix": lambda t: t @ torch.ones(3, 2),
    "a list": lambda t: torch.cat([t, torch.ones(1, 3)]),
    "index_select": lambda t: t.index_select(0, host_index),
    "index_select by a number": lambda t: t.index_select(0, torch.tensor(1)),
    "gather": lambda t: t.gather(0, torch.zeros(1, 3, dtype=torch.int64)),
    "scatter": lambda t: t.scatter(0, torch.zeros(1, 3, dtype=torch.int64), 1.0),
    "index_add": lambda t: t.index_add(0, host_index, t[:2]),
    "embedding": lambda t: F.embedding(host_index, t),
    "masked_fill": lambda t: t.masked_fill(torch.ones(4, 3, dtype=torch.bool), 1.0),
    "in place on the host": lambda t: torch.ones(4, 3).add_(t),
    "in place on a number of the host": lambda t: torch.tensor(1.0).add_(t.sum()),
    "out on the host": lambda t: torch.add(t, 1, out=torch.empty(4, 3)),
    "indices of the device into the host": lambda t: torch.ones(4)[torch.tensor([1], device="apart")],
    "a generator of the host": lambda t: t.normal_(generator=torch.Generator()),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_host_tensors_that_cuda_takes(name):
    found = ALLOWED[name](device_tensor())
    assert torch.equal(found.cpu(), ALLOWED[name](torch.arange(12.0).reshape(4, 3)))


@pytest.mark.parametrize("name", REFUSED)
def test_host_tensors_that_cuda_refuses(name):
    with pytest.raises(RuntimeError, match=r"same device|device type for generator"):
        REFUSED[name](device_tensor())


# ---- random numbers, mixed precision, parameters


def test_random_numbers_follow_the_seed_and_the_calls():
    torch.manual_seed(5)
    first = [torch.rand(3, device="apart") for _ in range(2)]
    state = torch.apart.get_rng_state()
    third = torch.rand(3, device="apart")
    torch.apart.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="apart"), third)
    torch.manual_seed(5)
    again = [torch.rand(3, device="apart") for _ in range(2)]
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert not torch.equal(first[0], first[1])


def test_a_draw_belongs_to_the_call(side):
    torch.manual_seed(5)
    expected = [torch.rand(3, device="apart").tolist() for _ in range(2)]
    torch.manual_seed(5)
    with apart.paused(torch.accelerator.current_stream()):
        first = torch.rand(3, device="apart")
        with side:
            second = torch.rand(3, device="apart")
        side.synchronize()  # it runs before the first one
    assert [first.tolist(), second.tolist()] == expected


def test_devices_have_generators_of_their_own():
    torch.manual_seed(5)
    first = torch.rand(3, device="apart:0")
    assert torch.equal(torch.rand(3, device="apart:1").cpu(), first.cpu())
    generator = torch.Generator(device="apart").manual_seed(5)
    assert torch.equal(torch.rand(3, device="apart", generator=generator), first)


def test_dropout_is_drawn_again_from_a_saved_state():
    data = torch.ones(1000, device="apart")
    state = torch.apart.get_rng_state()
    first = F.dropout(data, 0.5)
    torch.apart.set_rng_state(state)
    assert torch.equal(F.dropout(data, 0.5), first)
    assert set(first.unique().tolist()) == {0, 2}
    assert 300 < first.count_nonzero() < 700


def test_autocast():
    layer = torch.nn.Linear(4, 4, device="apart")
    with torch.autocast("apart", dtype=torch.bfloat16):
        low = layer(torch.ones(2, 4, device="apart"))
        assert low.dtype == torch.bfloat16
        assert low.softmax(-1).dtype == torch.float32
    assert layer(torch.ones(2, 4, device="apart")).dtype == torch.float32


def test_a_parameter_moves_by_its_data():
    parameter = torch.nn.Parameter(torch.ones(4))
    same = parameter.data
    parameter.data = same.to("apart")
    assert parameter.device.type == "apart"
    (parameter * 2).sum().backward()
    assert parameter.grad.device.type == "apart"
    parameter.grad = None
    parameter.data = same
    assert parameter.device.type == "cpu"
    assert torch.equal(parameter, torch.ones(4))
