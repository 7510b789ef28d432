import pytest
from simulation.links import HostTraffic, Link, Links

from lightning_cxl.errors import TierNotFoundError

GIB = 2**30
CARD = Link(50e9, 40e9, duplex=1.5)
LINKS = Links(device=Link(55e9, 55e9, 6e-6, duplex=2), tiers={"dram": Link(280e9, 280e9), "cxl0": CARD, "cxl1": CARD})


def test_a_tier_without_a_link_is_refused_with_what_there_is():
    with pytest.raises(TierNotFoundError, match="no link for tier `ssd`: the simulated host has dram, cxl0, cxl1"):
        LINKS.route("h2d", {"ssd": 1.0})


def test_host_work_on_a_tier_without_a_link_is_refused():
    with pytest.raises(TierNotFoundError, match="no link for tier `ssd`"):
        LINKS.host_route({"dram": HostTraffic(1, 1), "ssd": HostTraffic(1, 1)})


@pytest.mark.parametrize("values", [(-1, 0), (0, float("inf"))])
def test_traffic_that_no_work_has_is_refused(values):
    with pytest.raises(ValueError, match="traffic must be"):
        HostTraffic(*values)


def test_cards_have_links_of_their_own():
    both = {"cxl0": 0.5, "cxl1": 0.5}
    # written to two cards, a copy is as fast as the device's link
    assert LINKS.route("d2h", both).seconds(2 * GIB) == LINKS.route("d2h", {"dram": 1.0}).seconds(2 * GIB)


def test_links_of_other_speeds_take_proportionally_longer():
    slow = LINKS.scaled(1 / 8, 8.0)
    for direction, shares in (("h2d", {"cxl0": 1.0}), ("d2h", {"dram": 0.5, "cxl0": 0.5})):
        assert slow.route(direction, shares).seconds(GIB) == pytest.approx(
            8 * LINKS.route(direction, shares).seconds(GIB)
        )


@pytest.mark.parametrize("shares", [{"dram": 0.5}, {"dram": 1.5, "cxl": -0.5}])
def test_shares_that_are_not_fractions_of_a_whole_are_refused(shares):
    with pytest.raises(ValueError, match="must add up to 1"):
        LINKS.route("h2d", shares)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ((0, 1), "read_bytes_per_s"),
        ((1, float("inf")), "write_bytes_per_s"),
        ((1, 1, -1), "latency_s"),
        ((1, 1, 0, 3), "duplex"),
    ],
)
def test_values_that_no_link_has_are_refused(values, name):
    with pytest.raises(ValueError, match=name):
        Link(*values)
