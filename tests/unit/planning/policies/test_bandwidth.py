"""What our policy does, and why, on the machine of arXiv 2507.03305 and at the borders."""

import itertools

import pytest

from lightning_cxl.planning.job import predict_step
from lightning_cxl.planning.policies import Bandwidth, Bounds, LatencyFirst, minimise
from tests.unit.planning.policies.jobs import NEMO_12B, QWEN_7B, R, machine

STREAMED = (R.MOMENTUM, R.VARIANCE, R.MASTER_GRADS, R.MASTER_WEIGHTS)


def test_what_the_cpus_stream_is_split_so_that_both_memories_finish_together():
    host = machine(dram=4096)
    decision = Bandwidth().decide(QWEN_7B, host)
    parts = {decision.splits[role]["dram0"] for role in STREAMED}
    assert len(parts) == 1 and 0.65 < parts.pop() < 0.9
    update = predict_step(QWEN_7B, decision.splits, host).update
    assert update.resources["tier dram0"] == pytest.approx(update.resources["tier cxl0"], rel=0.03)


def test_weights_and_activations_lie_on_the_cards_and_gradients_come_before_them():
    splits = Bandwidth().decide(QWEN_7B, machine(dram=4096, cards=(256, 256))).splits
    for role in (R.COMPUTE_WEIGHTS, R.ACTIVATIONS):
        assert splits[role] == pytest.approx({"cxl0": 0.5, "cxl1": 0.5})
    assert splits[R.COMPUTE_GRADS].get("dram0", 0) > 0.5


@pytest.mark.parametrize(("job", "dram", "cards"), [(QWEN_7B, 100, 1), (QWEN_7B, 128, 2), (NEMO_12B, 128, 2)])
def test_faster_than_the_greedy_where_a_class_does_not_fit(job, dram, cards):
    host = machine(dram=dram, cards=(256,) * cards)
    ours, greedy = (
        predict_step(job, policy.decide(job, host).splits, host) for policy in (Bandwidth(), LatencyFirst())
    )
    assert ours.seconds < greedy.seconds * 0.999


def test_the_search_finds_what_trying_everything_finds():
    sizes = (40, 30, 30)
    bounds = Bounds(sizes, most_local=55, least_local=10)

    def cost(x):
        near = sum(weight * part for weight, part in zip((4, 2, 1), x, strict=True))
        far = sum(weight * (1 - part) for weight, part in zip((9, 6, 4), x, strict=True))
        return max(near, far) + max(3 * x[1], 2 * (1 - x[2]))

    grid = [i / 40 for i in range(41)]
    best = min(cost(x) for x in itertools.product(grid, repeat=3) if 10 <= bounds.local(x) <= 55)
    found = minimise(cost, bounds, [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0)])
    assert 10 - 1e-9 <= bounds.local(found) <= 55 + 1e-9
    assert cost(found) <= best * 1.02
