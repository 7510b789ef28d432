import pytest

from lightning_cxl.errors import TierNotFoundError
from lightning_cxl.transfer.links import Link, Traffic
from lightning_cxl.transfer.machines import paper_machine

GIB = 2**30
PAPER = paper_machine()


@pytest.mark.parametrize(
    ("cxl_share", "measured_h2d", "measured_d2h"),
    [
        (0.0, 51.8, 51.7),
        (1.0, 49.8, 34.7),
        (1 / 2, 51.8, 50.2),
        (2 / 3, 51.8, 45.9),
        (3 / 4, 51.8, 43.2),
        (4 / 5, 51.8, 42.1),
    ],
)
def test_the_model_agrees_with_what_was_measured_on_cxl_cards(cxl_share, measured_h2d, measured_d2h):
    shares = {"dram": 1 - cxl_share, "cxl0": cxl_share}
    for direction, measured, tolerance in (("h2d", measured_h2d, 0.01), ("d2h", measured_d2h, 0.13)):
        gib_per_s = 2 / PAPER.route(direction, shares).seconds(2 * GIB)
        assert gib_per_s == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize(
    ("cxl_share", "measured_ms"),
    [(0.0, 67.63), (1.0, 273.3), (1 / 2, 138.9), (2 / 3, 175.6), (3 / 4, 200.2), (4 / 5, 216.3)],
)
def test_the_model_agrees_with_adam_steps_that_were_measured_on_a_cxl_card(cxl_share, measured_ms):
    traffic = {
        tier: Traffic(16, 12) * (671e6 * share) for tier, share in (("dram", 1 - cxl_share), ("cxl0", cxl_share))
    }
    seconds = PAPER.host_route(traffic).seconds(28 * 671e6)
    assert seconds * 1e3 == pytest.approx(measured_ms, rel=0.05)


def test_a_tier_without_a_link_is_refused_with_what_there_is():
    with pytest.raises(TierNotFoundError, match="no link for tier `ssd`: the simulated host has dram, cxl0"):
        PAPER.route("h2d", {"ssd": 1.0})


def test_host_work_on_a_tier_without_a_link_is_refused():
    with pytest.raises(TierNotFoundError, match="no link for tier `ssd`"):
        PAPER.host_route({"dram": Traffic(1, 1), "ssd": Traffic(1, 1)})


@pytest.mark.parametrize("values", [(-1, 0), (0, float("inf"))])
def test_traffic_that_no_work_has_is_refused(values):
    with pytest.raises(ValueError, match="traffic must be"):
        Traffic(*values)


def test_cards_have_links_of_their_own():
    assert list(paper_machine(2).tiers) == ["dram", "cxl0", "cxl1"]
    both = {"cxl0": 0.5, "cxl1": 0.5}
    # written to two cards, a copy is as fast as the device's link
    assert paper_machine(2).route("d2h", both).seconds(2 * GIB) == PAPER.route("d2h", {"dram": 1.0}).seconds(2 * GIB)


def test_links_of_other_speeds_take_proportionally_longer():
    slow = PAPER.scaled(1 / 8, 8.0)
    for direction, shares in (("h2d", {"cxl0": 1.0}), ("d2h", {"dram": 0.5, "cxl0": 0.5})):
        assert slow.route(direction, shares).seconds(GIB) == pytest.approx(
            8 * PAPER.route(direction, shares).seconds(GIB)
        )


@pytest.mark.parametrize("shares", [{"dram": 0.5}, {"dram": 1.5, "cxl": -0.5}])
def test_shares_that_are_not_fractions_of_a_whole_are_refused(shares):
    with pytest.raises(ValueError, match="must add up to 1"):
        PAPER.route("h2d", shares)


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
