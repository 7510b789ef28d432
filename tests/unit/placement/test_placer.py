"""Where `Placer` puts a tensor: on the tier that is asked for, on the tiers of a decision, or in its role's home."""

from pathlib import Path

import pytest

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import MissingTierWarning, TierNotFoundError, UnsupportedError
from lightning_cxl.machine.topology import Node, Tier, TierKind, Topology
from lightning_cxl.memory.placement import Placement, Placer, TensorRole, TierSpec

TOPOLOGY = Topology.fake(dram=("8GiB",), cxl=("8GiB",))
WITH_SSD = TOPOLOGY.with_ssd(SsdOptions((Path("/nvme/run"),), 1 << 40))
CXL_HOMES = {TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS}
STATE = (TensorRole.MOMENTUM, TensorRole.VARIANCE, TensorRole.MASTER_WEIGHTS)


def placer(topology=TOPOLOGY, dram=8 << 30, **options) -> Placer:
    return Placer(topology, lambda: {"dram": dram, "cxl": 8 << 30}, **options)


@pytest.mark.parametrize("role", list(TensorRole))
def test_every_role_has_a_home_and_weights_are_near_the_cpu_that_computes(role):
    placement = placer().place(role, 1024)
    assert placement.tiers == (("cxl", "dram") if role in CXL_HOMES else ("dram", "cxl"))
    assert not placement.pinned and role.value in placement.reason
    of_cpu = placer(cpu_computes=True).place(role, 1024)
    assert of_cpu.tiers == (("cxl", "dram") if role is TensorRole.ACTIVATIONS else ("dram", "cxl"))


def test_explicit_tier_goes_first():
    placement = placer().place(TensorRole.MOMENTUM, 1024, tier="cxl", source="rule 'layers.*'")
    assert placement.describe() == "cxl, else dram (rule 'layers.*')"
    placement = placer().place(TensorRole.MOMENTUM, 1024, spec=TierSpec(optimizer_state="cxl"))
    assert placement.describe() == "cxl, else dram (tier(optimizer_state=cxl))"


@pytest.mark.parametrize("tier", [None, "dram"])
def test_full_first_choice_stays_first_and_the_reason_tells(tier):
    # moving it back would spill without the allocator noticing, so without a warning or refusal
    placement = placer(dram=1 << 20).place(TensorRole.MOMENTUM, 2 << 20, tier=tier)
    assert placement.tiers == ("dram", "cxl")
    assert "dram has 1.0 MiB free of 2.0 MiB needed" in placement.reason


def test_a_decision_is_placed_with_its_reason_and_leaves_the_rest_to_rules_and_homes():
    splits = {TensorRole.MOMENTUM: {"cxl": 0.75, "dram": 0.25}, TensorRole.COMPUTE_GRADS: {"cxl": 1.0}}
    decided = placer(splits=splits, reasons={TensorRole.MOMENTUM: "because"})
    split = Placement(("cxl", "dram"), False, "because", (0.75, 0.25))
    assert decided.place(TensorRole.MOMENTUM, 100) == split
    # a tier alone has the others to spill to
    assert decided.place(TensorRole.COMPUTE_GRADS, 100) == Placement(("cxl", "dram"))
    asked = decided.place(TensorRole.COMPUTE_GRADS, 100, tier="dram", source="rule 'x'")
    assert asked.tiers == ("dram", "cxl") and "rule 'x'" in asked.reason
    assert decided.place(TensorRole.ACTIVATIONS, 100).tiers == ("cxl", "dram")


def test_spill_prefers_a_tier_that_can_hold_it():
    near, far, dram = (Node(i, False, 1 << 30) for i in range(3))
    kinds = {"dram": (TierKind.DRAM, dram), "near": (TierKind.CXL, near), "far": (TierKind.CXL, far)}
    topology = Topology(tuple(Tier(name, kind, (node,)) for name, (kind, node) in kinds.items()))
    for free, tiers in (((1000, 1000, 1000), ("dram", "near", "far")), ((0, 99, 100), ("dram", "far", "near"))):
        found = Placer(topology, lambda free=free: dict(zip(kinds, free, strict=True)))
        assert found.place(TensorRole.VARIANCE, 100).tiers == tiers


def test_a_missing_tier_is_there_when_it_is_asked_for():
    topology = Topology.fake(dram=("4GiB",), cxl=())
    with pytest.warns(MissingTierWarning) as caught:
        assert placer(topology).place(TensorRole.MOMENTUM, 1, tier="cxl").tiers == ("cxl", "dram")
        assert placer(topology).place(TensorRole.MOMENTUM, 1, tier="cxl").tiers == ("cxl", "dram")
    assert len(caught) == 1
    with pytest.raises(TierNotFoundError, match=r"'hbm'.*'dram', 'cxl'"):
        placer(topology).place(TensorRole.MOMENTUM, 1, tier="hbm")


@pytest.mark.parametrize("role", STATE)
def test_state_that_asks_for_the_tier_ssd_gets_nothing_else_whatever_was_decided(role):
    placement = placer(WITH_SSD, splits={role: {"dram": 1.0}}).place(role, 1 << 50, tier="ssd", source="rule 'net.*'")
    assert placement == Placement(("ssd",), reason="rule 'net.*'")


@pytest.mark.parametrize("role", [role for role in TensorRole if role not in STATE])
def test_what_cannot_lie_on_the_tier_ssd_is_refused(role):
    with pytest.raises(UnsupportedError, match=f"tier.all=ssd. asks for {role.value} on tier 'ssd'.*Only optimizer"):
        placer(WITH_SSD).place(role, 1, tier="ssd", source="tier(all=ssd)")


def test_a_decorated_module_is_made_in_memory_and_moves_to_the_tier_ssd_later():
    placed = placer(WITH_SSD).place(TensorRole.COMPUTE_WEIGHTS, 1, spec=TierSpec(weights="ssd"))
    assert placed == Placement(("cxl", "dram"), reason="home of compute_weights")
