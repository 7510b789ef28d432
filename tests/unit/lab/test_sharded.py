"""Overlap of several ranks in simulated time: against the ideal, against what `plan` predicts, and by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from footprint import PUBLISHED
from schedule.sharded import ShardedUnits, simulate
from sharded import predicted_s, units_of
from simulation.links import HostTraffic, Link, Links

from lightning_cxl.machine.speeds import load_machine

HOST = load_machine(Path(__file__).resolve().parents[3] / "examples" / "machines" / "eight_gpus.yaml")
SHAPE = PUBLISHED["llama-3.1-8b"]
LINKS = Links(device=Link(8, 8, duplex=2), tiers={"host": Link(64, 64, duplex=2)})
TWO = ShardedUnits(
    num_ranks=2,
    num_units=4,
    forward_s=1.0,
    backward_s=2.0,
    weight_bytes=16,
    activation_bytes=0.5,
    adam=HostTraffic(8, 8),
    links=LINKS,
    peer_bytes_per_s=16,
    overlap="backward",
)


def test_a_step_by_hand():
    step = simulate(TWO)
    # a unit: its shard of 8 bytes is read in 1 s, gathered in 1/2 s and computed in 1 s; backward computes 2 s
    assert step.busy_s["forward"]["device 0, h2d"] == step.busy_s["forward"]["device 1, h2d"] == pytest.approx(4)
    assert step.busy_s["forward"]["peer 0"] == pytest.approx(4 * 8 / 16)
    assert step.busy_s["backward"]["peer 0"] == pytest.approx(2 * 4 * 8 / 16)
    assert step.busy_s["backward"]["device 0, d2h"] == pytest.approx(4 * 1)
    # both ranks read shards and inputs, and write gradients; updates read and write beside them
    assert step.busy_s["backward"]["tier host, h2d"] == pytest.approx((4 * 16 + 4 * 1 + 4 * 8) / 64)
    assert step.longest_s == pytest.approx(4 * 1 + 4 * 2)
    assert step.ideal_s == pytest.approx(step.busy_s["forward"]["device 0, h2d"] + 8)
    assert step.bound_by("backward").startswith("compute")
    # the first unit is updated last: it is reduced, leaves, is updated (two ranks write 8 bytes each way), comes back
    assert step.seconds == pytest.approx(step.ideal_s + 0.5 + 1.0 + 0.125 + 1.0 + 0.5, abs=0.2)


@pytest.mark.parametrize(("count", "tokens"), [(2, 1024), (2, 4096), (4, 2048), (8, 2048)])
def test_prefetch_brings_a_step_close_to_the_ideal_and_without_it_it_is_not(count, tokens):
    units = units_of(SHAPE, tokens, HOST, count)
    steps = [simulate(replace(units, prefetch=ahead), num_steps=2) for ahead in (0, 1)]
    alone, ahead = (step.seconds / step.ideal_s for step in steps)
    assert 1 <= ahead <= 1.10
    assert alone > 1.10 and alone > 1.1 * ahead
    assert predicted_s(units, HOST) == pytest.approx(steps[1].seconds, rel=0.02)
