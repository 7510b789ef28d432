"""Which memory is taken for a gradient of ours."""

import numpy
import pytest
import torch
from torch.nn import Parameter

from lightning_cxl.gradients.meter import GradientMeter
from lightning_cxl.gradients.offload import GradientSums
from lightning_cxl.optim.masters import WeightPair
from lightning_cxl.placement.placement import TensorRole


def test_only_the_very_tensor_that_was_given_out_is_ours_not_what_lies_at_its_address():
    memory = torch.zeros(4)
    sums = GradientSums(lambda wanted, role: [memory.view(4) for _ in wanted], GradientMeter(1))
    parameter = Parameter(torch.zeros(4))
    pair = WeightPair("p", parameter, parameter, torch.float32)
    assert not sums.is_ours(pair, memory)
    (own,) = sums.new([pair], [torch.float32])
    assert sums.is_ours(pair, own) and not sums.is_ours(pair, memory.view(4))
    del own
    assert not sums.is_ours(pair, memory.view(4))


class Everywhere:
    """All memory is where gradients belong; counts those that are kept, until they die."""

    def __init__(self):
        self.live = []

    def gradient_stays(self, parameter, role):
        return True

    def gradient_in_place(self, parameter, grad, role):
        entry = (role, grad.nbytes)
        self.live.append(entry)
        outer = self

        class Counted:
            def __del__(self):
                outer.live.remove(entry)

        return Counted()


def kept_and_moved(grad, parameter, dtype=torch.float32, in_place=None):
    moved = []

    def allocate_all(wanted, role):
        moved.extend(wanted)
        return [torch.empty_like(parameter, dtype=dtype) for parameter, dtype in wanted]

    sums = GradientSums(allocate_all, GradientMeter(1), in_place)
    pair = WeightPair("p", parameter, parameter, torch.float32)
    first = sums.first(pair, grad, dtype)
    assert sums.is_ours(pair, first) and torch.equal(first.float(), grad.float())
    return first is grad, len(moved)


def test_a_gradient_that_lies_where_it_belongs_is_kept_and_counted_while_it_lives():
    everywhere = Everywhere()
    sums = GradientSums(lambda *_: pytest.fail("took memory"), GradientMeter(1), everywhere)
    parameter = Parameter(torch.zeros(4, 3))
    pair = WeightPair("p", parameter, parameter, torch.float32)
    assert sums.stays(pair)
    grad = torch.ones(4, 3)
    assert sums.first(pair, grad, torch.float32) is grad and sums.is_ours(pair, grad)
    assert everywhere.live == [(TensorRole.COMPUTE_GRADS, 48)]
    del grad
    assert everywhere.live == []


def test_without_a_tier_that_is_everywhere_all_gradients_move():
    parameter = Parameter(torch.zeros(4, 3))
    pair = WeightPair("p", parameter, parameter, torch.float32)
    assert not GradientSums(lambda *_: [], GradientMeter(1)).stays(pair)
    assert kept_and_moved(torch.ones(4, 3), parameter) == (False, 1)


@pytest.mark.parametrize(
    "grad, dtype",
    [
        (torch.ones(9, 3)[:4], torch.float32),  # would keep all nine rows alive
        (torch.empty_strided((4, 3), (1, 4)).fill_(1), torch.float32),
        (torch.ones(1, 3).expand(4, 3), torch.float32),
        (torch.ones(4, 3, dtype=torch.bfloat16), torch.float32),
    ],
    ids=["part of a larger tensor", "another order", "fewer elements", "another type"],
)
def test_a_gradient_moves_that_is_not_like_its_parameter_in_memory_of_its_own(grad, dtype):
    parameter = Parameter(torch.zeros(4, 3))
    assert kept_and_moved(grad, parameter, dtype, Everywhere()) == (False, 1)
    assert kept_and_moved(torch.ones(4, 3), parameter, torch.float32, Everywhere()) == (True, 0)


def test_a_wider_master_gradient_needs_memory_of_its_own():
    compute, master = Parameter(torch.zeros(4, dtype=torch.bfloat16)), Parameter(torch.zeros(4))
    sums = GradientSums(lambda *_: [], GradientMeter(1), Everywhere())
    assert not sums.stays(WeightPair("p", compute, master, torch.float32))
    assert sums.stays(WeightPair("p", compute, master, torch.bfloat16))


def test_a_gradient_that_two_parameters_share_moves():
    one, other, factor = Parameter(torch.zeros(12)), Parameter(torch.zeros(12)), torch.ones(4, 3)
    ((one.view(4, 3) + other.view(4, 3)) * factor).sum().backward()
    assert one.grad.data_ptr() == other.grad.data_ptr(), "torch has given both the same memory"
    assert kept_and_moved(one.grad, one, in_place=Everywhere()) == (False, 1)


def test_a_gradient_in_memory_of_others_moves():
    grad = torch.from_numpy(numpy.ones(12, dtype=numpy.float32))
    assert kept_and_moved(grad, Parameter(torch.zeros(12)), in_place=Everywhere()) == (False, 1)
