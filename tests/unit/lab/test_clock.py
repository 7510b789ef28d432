"""Numbers are powers of two or their sums, so that times are exact."""

import math

import pytest
from simulation.clock import LinkClock
from simulation.links import HostTraffic, Link, Links


def links(duplex=1.0, device_latency=0.0, tier_latency=0.0):
    """A device link of 8 bytes per second each way; tiers of 4, of 16, and of 4 when read and 2 when written."""
    return Links(
        device=Link(8, 8, device_latency, duplex=2),
        tiers={"slow": Link(4, 4, tier_latency, duplex=duplex), "fast": Link(16, 16), "uneven": Link(4, 2)},
    )


def test_a_copy_takes_as_long_as_its_slowest_resource():
    for tier, direction, seconds in (("slow", "h2d", 16), ("fast", "d2h", 8), ("uneven", "d2h", 32)):
        clock = LinkClock()
        route = links().route(direction, {tier: 1.0})
        flow = clock.submit(direction, 64, route, now_s=100.0)
        assert (flow.start_s, clock.next_event_s()) == (100.0, 100.0 + seconds)
        assert route.seconds(64) == seconds
        clock.advance(math.nextafter(100.0 + seconds, 0))
        assert not flow.has_ended()
        clock.advance(1000.0)  # told late
        assert flow.end_s == 100.0 + seconds
        assert clock.next_event_s() == math.inf


def test_latency_is_the_devices_and_the_slowest_tiers_and_takes_up_no_bandwidth():
    route = links(device_latency=1.0, tier_latency=2.0).route("h2d", {"slow": 1.0})
    clock = LinkClock()
    first = clock.submit("h2d", 16, route, now_s=0.0)
    other = clock.submit("d2h", 12, links().route("d2h", {"slow": 1.0}), now_s=0.0)
    clock.advance(50.0)
    assert other.end_s == 3.0
    assert first.end_s == route.seconds(16) == 7.0


def test_two_directions_share_a_tier_until_one_ends():
    clock = LinkClock()
    read = clock.submit("h2d", 8, links().route("h2d", {"slow": 1.0}), now_s=0.0)
    write = clock.submit("d2h", 8, links().route("d2h", {"slow": 1.0}), now_s=1.0)
    clock.advance(10.0)
    assert read.end_s == 3.0  # 4 bytes alone, 4 bytes at half the rate
    assert write.end_s == 4.0  # 4 bytes at half the rate, 4 bytes alone


@pytest.mark.parametrize(("duplex", "seconds"), [(1.0, 4.0), (1.5, 8 / 3), (2.0, 2.0)])
def test_duplex_says_how_much_of_both_directions_fits_side_by_side(duplex, seconds):
    clock = LinkClock()
    flows = [
        clock.submit(direction, 8, links(duplex).route(direction, {"slow": 1.0}), now_s=0.0)
        for direction in ("h2d", "d2h")
    ]
    clock.advance(10.0)
    assert [flow.end_s for flow in flows] == pytest.approx([seconds, seconds])


@pytest.mark.parametrize(
    ("shares", "seconds"),
    [
        ({"slow": 0.5, "fast": 0.5}, 8.0),  # both the device's link and `slow` are full
        ({"slow": 0.75, "fast": 0.25}, 12.0),
        ({"slow": 0.25, "fast": 0.75}, 8.0),
        ({"slow": 0.0, "fast": 1.0}, 8.0),
    ],
)
def test_a_striped_copy_ends_when_its_slowest_part_does(shares, seconds):
    assert links().route("h2d", shares).seconds(64) == seconds


def test_a_lane_is_in_order_and_the_next_copy_starts_when_the_one_before_ended_however_late_that_is_noticed():
    clock = LinkClock()
    route = links().route("h2d", {"fast": 1.0})
    flows = [clock.submit("h2d", 8, route, now_s=0.0) for _ in range(3)]
    clock.advance(2.75)
    assert [(flow.start_s, flow.end_s) for flow in flows] == [(0.0, 1.0), (1.0, 2.0), (2.0, None)]
    late = clock.submit("h2d", 8, route, now_s=10.0)
    assert flows[2].end_s == 3.0
    assert late.start_s == 10.0


def test_after_holds_a_copy_and_those_behind_it_on_its_lane():
    clock = LinkClock()
    route = {direction: links().route(direction, {"fast": 1.0}) for direction in ("h2d", "d2h")}
    out = clock.submit("d2h", 16, route["d2h"], now_s=0.0)
    back = clock.submit("h2d", 8, route["h2d"], now_s=0.0, after=[out])
    behind = clock.submit("h2d", 8, route["h2d"], now_s=0.0)
    finished = clock.submit("d2h", 8, route["d2h"], now_s=5.0, after=[out])
    clock.advance(10.0)
    assert [(flow.start_s, flow.end_s) for flow in (back, behind)] == [(2.0, 3.0), (3.0, 4.0)]
    assert finished.start_s == 5.0


def test_host_work_competes_with_copies_for_tiers_and_not_for_the_devices_link():
    clock = LinkClock()
    work = clock.submit("host", 16, links().host_route({"slow": HostTraffic(12, 4)}), now_s=0.0)
    copy = clock.submit("h2d", 4, links().route("h2d", {"slow": 1.0}), now_s=0.0)
    other = clock.submit("d2h", 16, links().route("d2h", {"fast": 1.0}), now_s=0.0)
    clock.advance(10.0)
    assert copy.end_s == 2.0  # 4 bytes at half the rate
    assert work.end_s == 5.0  # 4 bytes at half the rate, 12 alone
    assert other.end_s == 2.0
