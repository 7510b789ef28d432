"""What the overlap benchmark compares with: ideals, and placements of the paper, against figures worked out by hand."""

from functools import partial

import pytest
from schedule.ideal import UnitShape
from schedule.paper import (
    GIB,
    MODELS,
    OUR_LAYOUT,
    PAPER_LAYOUT,
    Machine,
    balanced,
    classes_of,
    latency_first,
    naive_interleave,
    paper_links,
    role_homes,
    update_traffic,
)
from schedule.replay import Setting, closed_form, contenders

from lightning_cxl.tiers.placement import TensorRole
from lightning_cxl.transfer.links import Traffic

ROLES = {
    "m": TensorRole.MOMENTUM,
    "v": TensorRole.VARIANCE,
    "mg": TensorRole.MASTER_GRADS,
    "mw": TensorRole.MASTER_WEIGHTS,
    "cw": TensorRole.COMPUTE_WEIGHTS,
    "act": TensorRole.ACTIVATIONS,
    "cg": TensorRole.COMPUTE_GRADS,
}
SEVEN, TWELVE = MODELS


def local_gib(shape, dram_gib, num_cards):
    """GiB of every class in DRAM, by the authors' greedy, with one sequence of 32K."""
    classes = classes_of(shape, PAPER_LAYOUT, shape.activation_bytes(1, 32768))
    plan = latency_first(classes, Machine(dram_gib * GIB, num_cards), 1)
    return {name: plan(role, 0).get("dram0", 0) * classes[role] / GIB for name, role in ROLES.items()}


@pytest.mark.parametrize(
    ("shape", "dram_gib", "num_cards", "expected"),
    [
        (SEVEN, 100, 1, {"m": 28.37, "v": 28.37, "mg": 28.37, "mw": 14.2, "cw": 0.7, "act": 0, "cg": 0}),
        (SEVEN, 128, 1, {"m": 28.37, "v": 28.37, "mg": 28.37, "mw": 28.37, "cw": 14.19, "act": 0.3, "cg": 0}),
        (TWELVE, 100, 1, {"m": 45.63, "v": 45.63, "mg": 8.7, "mw": 0, "cw": 0, "act": 0, "cg": 0}),
        (TWELVE, 128, 1, {"m": 45.63, "v": 45.63, "mg": 22.8, "mw": 13.9, "cw": 0, "act": 0, "cg": 0}),
        (TWELVE, 128, 2, {"m": 45.63, "v": 45.63, "mg": 15.2, "mw": 15.2, "cw": 6.3, "act": 0, "cg": 0}),
    ],
)
def test_the_greedy_places_what_the_authors_code_places(shape, dram_gib, num_cards, expected):
    assert local_gib(shape, dram_gib, num_cards) == pytest.approx(expected, abs=0.06)


def test_classes_have_the_papers_sizes():
    classes = classes_of(TWELVE, PAPER_LAYOUT, TWELVE.activation_bytes(3, 32768))
    assert sum(classes.values()) / GIB == pytest.approx(228.1 + 37.5, abs=0.1)
    assert sum(each.stored for each in OUR_LAYOUT.roles.values()) == 14


@pytest.mark.parametrize("policy", [naive_interleave, latency_first, role_homes, balanced])
@pytest.mark.parametrize("layout", [PAPER_LAYOUT, OUR_LAYOUT])
@pytest.mark.parametrize("num_cards", [1, 2])
@pytest.mark.parametrize("shape", MODELS)
def test_every_placement_fits_the_machine(shape, num_cards, layout, policy):
    num_units, machine = 8, Machine(128 * GIB, num_cards)
    classes = classes_of(shape, layout, shape.activation_bytes(1, 32768))
    plan = (partial(policy, layout) if policy is balanced else policy)(classes, machine, num_units)
    local = 0.0
    for role, nbytes in classes.items():
        for unit in range(num_units):
            shares = plan(role, unit)
            assert sum(shares.values()) == pytest.approx(1)
            local += shares.get("dram0", 0) * nbytes / num_units
    if policy is not naive_interleave:
        assert local <= machine.dram_bytes * (1 + 1e-9)


def test_an_update_streams_what_the_paper_counts():
    traffic = update_traffic(PAPER_LAYOUT, lambda role, unit: {"dram0": 0.75, "cxl0": 0.25}, 0, 100)
    assert traffic == {"dram0": Traffic(18, 18) * 75, "cxl0": Traffic(18, 18) * 25}  # 6N + 28N + 2N
    only_dram = update_traffic(OUR_LAYOUT, lambda role, unit: {"dram0": 1.0}, 0, 100)
    assert only_dram == {"dram0": Traffic(14, 12) * 100}


def test_the_closed_form_of_an_update_in_dram_is_its_bytes_over_its_bandwidth():
    setting = Setting(SEVEN, 8, 4096, 150e12, 128 * GIB)
    closed = closed_form(setting, contenders()[0])
    assert closed.update_s == pytest.approx(36 * SEVEN.num_parameters / 276e9)
    assert closed.forward_s == setting.forward_s
    assert closed.step_s("after backward") == closed.forward_s + closed.backward_s + closed.update_s


def test_ideal_and_bound():
    shape = UnitShape(4, 4, 4, update_s=1.0, h2d_bytes_per_s=2.0, d2h_bytes_per_s=4.0)
    step = shape.step(num_units=10, num_slots=3, forward_s=5.0, backward_s=15.0)
    # to the device 10 weights, 7 once more, and 9 inputs; from it 10 inputs and 10 gradients; 10 updates
    assert step.serial_s() == 20 + 2 * 26 + 20 + 10
    assert step.ideal_s() == 2 * 26 + 2 + 1 + 1
    assert step.bound_s() == (20 + 0.5) + (2 * 16 + 1.5 + 1 + 1)
    slow = shape.step(num_units=10, num_slots=3, forward_s=100.0, backward_s=300.0)
    writing = UnitShape(4, 40, 4, update_s=1.0, h2d_bytes_per_s=20.0, d2h_bytes_per_s=4.0)
    assert writing.step(10, 3, 5.0, 15.0).bound_s() == (90 + 0.5) + (9 * 2 + 7 * 0.2 + 1.5 + 1 + 1)
    assert slow.ideal_s() == 400 + 2 + 1 + 1 == slow.bound_s()


def test_a_balanced_update_is_as_long_on_both():
    machine = Machine(1 << 50, 1)
    plan = balanced(OUR_LAYOUT, classes_of(SEVEN, OUR_LAYOUT, 0), machine, 1)
    traffic = update_traffic(OUR_LAYOUT, plan, 0, 1e9)
    links = paper_links(1)
    dram, card = (links.host_route({tier: traffic[tier]}).seconds(traffic[tier].nbytes) for tier in ("dram0", "cxl0"))
    assert dram == pytest.approx(card)
