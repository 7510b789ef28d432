"""FSDP2 of torch, with nothing of ours, trains on the device apart as on the CPU."""

import pytest
import torch

from tests.apart import fsdp_runs
from tests.cases import others_full
from tests.distributed.ranks import ranks_apart


@pytest.fixture(scope="module")
def ranks():
    with ranks_apart(2) as started:
        yield started


@pytest.fixture(scope="module")
def on_the_cpu(ranks):
    return ranks.run(fsdp_runs.plain, "plain", "cpu")


@pytest.mark.parametrize("offload", others_full([None, "pageable", "pinned"], ["pinned"]))
def test_fsdp_trains_as_on_the_cpu(ranks, on_the_cpu, offload):
    for (losses, weights), (expected_losses, expected) in zip(
        ranks.run(fsdp_runs.plain, "plain", "apart", offload), on_the_cpu, strict=True
    ):
        torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
