import pytest
from simulation.links import Link, Links

GIB = 2**30
CARD = Link(50e9, 40e9, duplex=1.5)
LINKS = Links(device=Link(55e9, 55e9, 6e-6, duplex=2), tiers={"dram": Link(280e9, 280e9), "cxl0": CARD, "cxl1": CARD})


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
