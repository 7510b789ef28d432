from dataclasses import replace
from pathlib import Path

import pytest
from footprint import PUBLISHED
from schedule.sharded import simulate
from sharded import predicted_s, units_of
from simulation.clock import LinkClock
from simulation.links import HostTraffic, Link, Links

from lightning_cxl.machine.speeds import load_machine


def links(duplex=1.0, device_latency=0.0, tier_latency=0.0):
    """A device link of 8 bytes per second each way; tiers of 4, of 16, and of 4 when read and 2 when written."""
    return Links(
        device=Link(8, 8, device_latency, duplex=2),
        tiers={"slow": Link(4, 4, tier_latency, duplex=duplex), "fast": Link(16, 16), "uneven": Link(4, 2)},
    )


def copied(direction, nbytes, tier="fast", now=0.0, after=(), **of_links):
    return direction, nbytes, links(**of_links).route(direction, {tier: 1.0}), now, after


BOTH = [("h2d", 8, "slow"), ("d2h", 8, "slow")]
# flows, those that one waits for by number, and when each starts and ends
FLOWS = {
    "latency is the device's and the slowest tier's, and takes up no bandwidth": (
        [copied("h2d", 16, "slow", device_latency=1.0, tier_latency=2.0), copied("d2h", 12, "slow")], [(0, 7), (0, 3)],
    ),
    # 4 bytes alone, and as many at half the rate
    "two directions share a tier until one ends": (
        [copied("h2d", 8, "slow"), copied("d2h", 8, "slow", now=1)], [(0, 3), (1, 4)],
    ),
    "a part of both directions fits side by side": ([copied(*each, duplex=1.5) for each in BOTH], [(0, 8 / 3)] * 2),
    "all of both directions fits side by side": ([copied(*each, duplex=2.0) for each in BOTH], [(0, 2)] * 2),
    "a lane is in order, however late an end is noticed": (
        [copied("h2d", 8), copied("h2d", 8), copied("h2d", 8), copied("h2d", 8, now=10)],
        [(0, 1), (1, 2), (2, 3), (10, 11)],
    ),
    "`after` holds a copy and those behind it on its lane": (
        [copied("d2h", 16), copied("h2d", 8, after=[0]), copied("h2d", 8), copied("d2h", 8, now=5, after=[0])],
        [(0, 2), (2, 3), (3, 4), (5, 6)],
    ),
    "host work competes with copies for tiers and not for the device's link": (
        [
            ("host", 16, links().host_route({"slow": HostTraffic(12, 4)}), 0, ()), copied("h2d", 4, "slow"),
            copied("d2h", 16),
        ],
        [(0, 5), (0, 2), (0, 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FLOWS)
def test_flows_by_hand(case):
    clock, flows = LinkClock(), []
    given, expected = FLOWS[case]
    for lane, nbytes, route, now_s, after in given:
        flows.append(clock.submit(lane, nbytes, route, now_s=now_s, after=[flows[index] for index in after]))
    clock.advance(50.0)
    assert [flow.start_s for flow in flows] == [start_s for start_s, _ in expected]
    assert [flow.end_s for flow in flows] == pytest.approx([end_s for _, end_s in expected])


MACHINES = Path(__file__).resolve().parents[3] / "examples" / "machines"
EIGHT = load_machine(MACHINES / "eight_gpus.yaml")


@pytest.mark.parametrize(("count", "tokens"), [(2, 1024), (2, 4096), (4, 2048), (8, 2048)])
def test_prefetch_brings_a_step_close_to_the_ideal_and_without_it_it_is_not(count, tokens):
    units = units_of(PUBLISHED["llama-3.1-8b"], tokens, EIGHT, count)
    steps = [simulate(replace(units, prefetch=ahead), num_steps=2) for ahead in (0, 1)]
    alone, ahead = (step.seconds / step.ideal_s for step in steps)
    assert 1 <= ahead <= 1.10
    assert alone > 1.10 and alone > 1.1 * ahead
    assert predicted_s(units, EIGHT) == pytest.approx(steps[1].seconds, rel=0.02)
