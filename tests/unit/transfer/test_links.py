import pytest

from lightning_cxl.errors import TierNotFoundError
from lightning_cxl.transfer.links import Link, Links

GIB = 2**30
# shared/reference/FACTS.md 4.1: the DMA caps that fit Paper A's measurements
PAPER = Links(
    device=Link(51.8 * GIB, 51.8 * GIB, 7e-6, duplex=2),
    tiers={"dram": Link(278e9, 278e9), "cxl": Link(49.6 * GIB, 35.6 * GIB, duplex=1.5)},
)


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
    shares = {"dram": 1 - cxl_share, "cxl": cxl_share}
    for direction, measured, tolerance in (("h2d", measured_h2d, 0.01), ("d2h", measured_d2h, 0.13)):
        gib_per_s = 2 / PAPER.route(direction, shares).seconds(2 * GIB)
        assert gib_per_s == pytest.approx(measured, rel=tolerance)


def test_a_tier_without_a_link_is_refused_with_what_there_is():
    with pytest.raises(TierNotFoundError, match="no link for tier `ssd`: the simulated host has dram, cxl"):
        PAPER.route("h2d", {"ssd": 1.0})


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
