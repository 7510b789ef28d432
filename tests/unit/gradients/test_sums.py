"""Which memory is taken for a gradient of ours."""

import torch
from torch.nn import Parameter

from lightning_cxl.gradients.meter import GradientMeter
from lightning_cxl.gradients.offload import GradientSums
from lightning_cxl.optim.masters import WeightPair


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
