"""Shards on the host train as FSDP2's own offloading does, and nothing of them stays on the device."""

import pytest
import torch

from tests import apart
from tests.apart import fsdp_runs
from tests.apart import ranks as processes
from tests.training_device import LATE
from tests.unit.sharding import host_updates


@pytest.fixture(scope="module")
def ranks():
    if why := apart.why_unavailable():
        pytest.skip(why)
    with processes.started(2) as started:
        yield started


def check(ranks, case, delays):
    expected = ranks.run(fsdp_runs.plain, case, "apart", "pinned")
    for found, (losses, weights) in zip(ranks.run(host_updates.train, case, delays), expected, strict=True):
        assert found.losses == losses
        assert found.weights.keys() == weights.keys()
        assert all(torch.equal(found.weights[name], weights[name]) for name in weights)
        assert found.on_host
        assert found.bytes_after == found.bytes_before


@pytest.mark.parametrize("case", fsdp_runs.CASES)
def test_training_equals_offloading_by_fsdp(ranks, case):
    check(ranks, case, {})


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("case", ["plain", "fetched ahead"])
def test_nothing_overtakes_a_late_copy_or_kernel(ranks, case, late):
    check(ranks, case, LATE[late])
