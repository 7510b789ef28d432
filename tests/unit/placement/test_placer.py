from collections.abc import Mapping
from pathlib import Path

import pytest

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import MissingTierWarning, TierNotFoundError, UnsupportedError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.placement import Placement, PlacementRequest, Placer, RoleHomePolicy, TensorRole, TierSpec

TOPOLOGY = Topology.fake(dram=("4GiB",), cxl=("8GiB",))


class RecordingPolicy:
    """Remembers what it was asked."""

    def __init__(self, answer: Placement) -> None:
        self.answer = answer
        self.asked: list[tuple[PlacementRequest, Mapping[str, int]]] = []

    def place(self, request: PlacementRequest, free: Mapping[str, int]) -> Placement:
        self.asked.append((request, free))
        return self.answer


def make_placer(policy=None, free=None) -> Placer:
    return Placer(TOPOLOGY, policy or RoleHomePolicy(TOPOLOGY), lambda: free or {})


def test_the_policy_is_told_everything_and_what_is_free_now():
    policy = RecordingPolicy(Placement(("cxl",)))
    free = {"dram": 1, "cxl": 2}
    make_placer(policy, free).place(TensorRole.VARIANCE, 7, spec=TierSpec(optimizer_state="cxl"), module="net.0")
    request, seen = policy.asked[0]
    assert request == PlacementRequest(TensorRole.VARIANCE, 7, "net.0", "cxl", "tier(optimizer_state=cxl)")
    assert seen == free


class ReadsFree:
    """Puts tensors on a tier that it reads the free bytes of."""

    def __init__(self, tier: str) -> None:
        self.tier = tier

    def place(self, request, free):
        return Placement((self.tier,) if free[self.tier] >= request.nbytes else ("dram",))


def test_a_policy_that_reads_what_a_missing_tier_has_free_gets_that_tier():
    topology = Topology.fake(dram=("4GiB",), cxl=())
    placer = Placer(topology, ReadsFree("cxl"), lambda: {tier.name: tier.capacity_bytes for tier in topology.tiers})
    with pytest.warns(MissingTierWarning) as caught:
        places = [placer.place(TensorRole.MOMENTUM, nbytes).tiers for nbytes in (4 * 2**30, 5 * 2**30)]
    assert places == [("cxl",), ("dram",)]
    assert len(caught) == 1
    with pytest.raises(TierNotFoundError, match=r"'hbm'.*'dram', 'cxl'"):
        Placer(topology, ReadsFree("hbm"), dict).place(TensorRole.MOMENTUM, 1)


def test_a_policy_that_names_an_unknown_tier_is_found_out():
    with pytest.raises(TierNotFoundError, match=r"'moon'.*'dram', 'cxl'"):
        make_placer(RecordingPolicy(Placement(("cxl", "moon")))).place(TensorRole.MOMENTUM, 1)


WITH_SSD = TOPOLOGY.with_ssd(SsdOptions((Path("/nvme/run"),), 1 << 40))
STATE = (TensorRole.MOMENTUM, TensorRole.VARIANCE, TensorRole.MASTER_WEIGHTS)


@pytest.mark.parametrize("role", STATE)
def test_state_that_asks_for_the_tier_ssd_gets_nothing_else_whatever_the_policy_says(role):
    policy = RecordingPolicy(Placement(("dram",)))
    placement = Placer(WITH_SSD, policy, dict).place(role, 1 << 50, tier="ssd", source="rule 'net.*'")
    assert placement == Placement(("ssd",), reason="rule 'net.*'")
    assert policy.asked == []


@pytest.mark.parametrize("role", [role for role in TensorRole if role not in STATE])
def test_what_cannot_lie_on_the_tier_ssd_is_refused(role):
    placer = Placer(WITH_SSD, RoleHomePolicy(WITH_SSD), dict)
    with pytest.raises(UnsupportedError, match=f"tier.all=ssd. asks for {role.value} on tier 'ssd'.*Only optimizer"):
        placer.place(role, 1, tier="ssd", source="tier(all=ssd)")


def test_a_policy_that_names_the_tier_ssd_is_refused():
    placer = Placer(WITH_SSD, RecordingPolicy(Placement(("dram", "ssd"))), dict)
    with pytest.raises(UnsupportedError, match=r"RecordingPolicy places momentum.*in memory \(dram, cxl\)"):
        placer.place(TensorRole.MOMENTUM, 1)


def test_a_decorated_module_is_made_in_memory_and_moves_to_the_tier_ssd_later():
    policy = RecordingPolicy(Placement(("dram",)))
    placed = Placer(WITH_SSD, policy, dict).place(TensorRole.COMPUTE_WEIGHTS, 1, spec=TierSpec(weights="ssd"))
    assert placed.tiers == ("dram",)
    assert policy.asked[0][0].tier is None
