import pytest

from lightning_cxl.machine.topology import Node, Tier, TierKind, Topology
from lightning_cxl.memory.placement import PlacementRequest, RoleHomePolicy, TensorRole

TOPOLOGY = Topology.fake(("8GiB",), ("8GiB",))
FREE = {"dram": 8 << 30, "cxl": 8 << 30}
CXL_HOMES = {TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS}


@pytest.mark.parametrize("role", list(TensorRole))
def test_every_role_has_a_home(role):
    placement = RoleHomePolicy(TOPOLOGY).place(PlacementRequest(role, 1024), FREE)
    assert placement.tiers == (("cxl", "dram") if role in CXL_HOMES else ("dram", "cxl"))
    assert not placement.pinned
    assert role.value in placement.reason


def test_weights_are_at_home_where_the_cpu_computes():
    policy = RoleHomePolicy(TOPOLOGY, cpu_computes=True)
    assert policy.place(PlacementRequest(TensorRole.COMPUTE_WEIGHTS, 1), FREE).tiers == ("dram", "cxl")
    assert policy.place(PlacementRequest(TensorRole.ACTIVATIONS, 1), FREE).tiers == ("cxl", "dram")


def test_explicit_tier_goes_first():
    request = PlacementRequest(TensorRole.MOMENTUM, 1024, module="layers.0", tier="cxl", source="rule 'layers.*'")
    placement = RoleHomePolicy(TOPOLOGY).place(request, FREE)
    assert placement.tiers == ("cxl", "dram")
    assert placement.describe() == "cxl, else dram (rule 'layers.*')"


@pytest.mark.parametrize("tier", [None, "dram"])
def test_full_first_choice_stays_first_and_the_reason_tells(tier):
    # moving it back would spill without the allocator noticing, so without a warning or refusal
    request = PlacementRequest(TensorRole.MOMENTUM, 2 << 20, tier=tier)
    placement = RoleHomePolicy(TOPOLOGY).place(request, {"dram": 1 << 20, "cxl": 8 << 30})
    assert placement.tiers == ("dram", "cxl")
    assert "dram has 1.0 MiB free of 2.0 MiB needed" in placement.reason


def three_tiers():
    near, far, dram = (Node(i, False, 1 << 30) for i in range(3))
    return Topology(
        (
            Tier("dram", TierKind.DRAM, (dram,)),
            Tier("near", TierKind.CXL, (near,)),
            Tier("far", TierKind.CXL, (far,)),
        )
    )


def test_spill_prefers_a_tier_that_can_hold_it():
    policy = RoleHomePolicy(three_tiers())
    request = PlacementRequest(TensorRole.VARIANCE, 100)
    assert policy.place(request, {"dram": 1000, "near": 1000, "far": 1000}).tiers == ("dram", "near", "far")
    assert policy.place(request, {"dram": 0, "near": 99, "far": 100}).tiers == ("dram", "far", "near")
