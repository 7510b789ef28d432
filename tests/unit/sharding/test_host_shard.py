"""Shards on the host train as FSDP2's own offloading does, and nothing of them stays on the device."""

import pytest
import torch

from tests import apart
from tests.apart import fsdp_runs
from tests.distributed.ranks import ranks_apart
from tests.training_device import LATE
from tests.unit.sharding import shard_runs


@pytest.fixture(scope="module")
def ranks():
    if why := apart.why_unavailable():
        pytest.skip(why)
    with ranks_apart(2) as started:
        yield started


def check(ranks, case, delays):
    expected = ranks.run(fsdp_runs.plain, case, "apart", "pinned")
    for found, (losses, weights) in zip(ranks.run(shard_runs.train, case, delays), expected, strict=True):
        assert found.losses == losses
        assert found.weights.keys() == weights.keys()
        assert all(torch.equal(found.weights[name], weights[name]) for name in weights)
        assert found.on_host
        assert found.bytes_after == found.bytes_before


@pytest.mark.parametrize("case", fsdp_runs.CASES)
def test_training_equals_offloading_by_fsdp(ranks, case):
    check(ranks, case, {})


@pytest.mark.parametrize("late", ["copies and kernels", "to the host, much"])
def test_nothing_overtakes_a_late_copy_or_kernel(ranks, late):
    check(ranks, "fetched ahead", LATE[late])


def test_the_device_computes_while_shards_come_and_gradients_go(ranks):
    for seen in ranks.run(shard_runs.one_step, "fetched ahead", {"kernel": 2e-3, "h2d": 4e-3, "d2h": 4e-3}):
        assert seen.hidden["h2d"] > 0.5  # of all but the first unit's
        assert seen.hidden["d2h"] > 0.2  # of all but the last units': the root has the embedding
        assert seen.host_share < 0.7  # it has not waited for the device


@pytest.fixture(scope="module")
def weights(ranks):
    return ranks.run(shard_runs.weights)


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_of_dcp_need_no_device(ranks, weights, tmp_path, asynchronous):
    for (found, moved), expected in zip(
        ranks.run(shard_runs.checkpoint, str(tmp_path), asynchronous), weights, strict=True
    ):
        assert equal(found, expected)
        assert moved == 0


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (shard_runs.sharded_state, ()),
        (shard_runs.whole_state, (False,)),
        (shard_runs.whole_state, (True,)),
        (shard_runs.pickled, ()),
        (shard_runs.moved_to_its_device, ()),
    ],
)
def test_state_comes_and_goes_as_with_any_tensor(ranks, weights, run, options):
    assert all(map(equal, ranks.run(run, *options), weights))


def test_weights_are_drawn_as_on_the_device(ranks):
    assert all(map(equal, ranks.run(shard_runs.drawn, True), ranks.run(shard_runs.drawn, False)))


def test_a_model_without_memory_gets_its_weights_on_the_host(ranks, weights):
    for (found, same), expected in zip(ranks.run(shard_runs.from_meta), weights, strict=True):
        assert equal(found, expected)
        assert all(same)
