"""Which parameters keep float32 state in 8 bit: embeddings and all that is called a norm."""

import pytest
from torch import nn

from lightning_cxl.inventory.plan import sensitive_parameters


class RMSNormOfAFamily(nn.RMSNorm):
    """Model families have their own."""


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(8), nn.InstanceNorm2d(8, affine=True), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.Embedding(3, 4),
     RMSNormOfAFamily(8)],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_norms_and_embeddings(module):
    linear = nn.Linear(2, 2)
    sensitive = sensitive_parameters(nn.Sequential(module, linear))
    assert module.weight in sensitive and linear.weight not in sensitive
