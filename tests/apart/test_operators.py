import pytest
import torch
from torch.nn import functional as F

from tests import apart


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
