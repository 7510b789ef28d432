"""Policies by name and by import path, and what a decided policy answers."""

import pytest

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.placement import Placement, Placer
from lightning_cxl.planning.policies import Decision, check_policy, get_policy
from tests.unit.planning.policies.jobs import R, job_of, machine


class AllFar:
    """A policy of somebody else."""

    def decide(self, job, machine):
        return Decision({role: {machine.names[-1]: 1.0} for role in job.free_classes()}, {})


class NeedsArguments:
    def __init__(self, size):
        self.size = size

    def decide(self, job, machine): ...


def test_import_path():
    decision = get_policy("tests.unit.planning.policies.test_registry.AllFar").decide(
        job_of({R.MOMENTUM: 8}), machine()
    )
    assert decision.splits == {R.MOMENTUM: {"cxl0": 1.0}}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bandwith", "there is no policy 'bandwith'; choose one of 'dram_only'"),
        ("nowhere.Policy", "cannot be imported"),
        ("tests.unit.planning.policies.test_registry.Missing", "cannot be imported"),
        ("tests.unit.planning.policies.test_registry.test_import_path", "is no class, or has no method `decide`"),
        ("tests.unit.planning.policies.test_registry.NeedsArguments", "cannot be constructed without arguments"),
    ],
)
def test_names_that_are_no_policy(name, message):
    with pytest.raises(ConfigError, match=message):
        get_policy(name)


class TensorByTensor:
    def place(self, request, free): ...


@pytest.mark.parametrize("given", [TensorByTensor(), f"{__name__}.TensorByTensor"])
def test_a_policy_that_is_asked_tensor_by_tensor_is_refused(given):
    with pytest.raises(ConfigError, match=r"no longer supported: `decide` .* `tier_rules` places single modules"):
        check_policy(given)


def decided(splits):
    return Placer(Topology.fake(["1GiB"], ["1GiB"]), dict, splits=splits, reasons={R.MOMENTUM: "because"})


def test_a_decided_split_is_placed_with_its_reason():
    placement = decided({R.MOMENTUM: {"cxl": 0.75, "dram": 0.25}}).place(R.MOMENTUM, 100)
    assert placement == Placement(("cxl", "dram"), False, "because", (0.75, 0.25))


def test_a_decided_tier_has_the_others_to_spill_to():
    placement = decided({R.COMPUTE_GRADS: {"cxl": 1.0}}).place(R.COMPUTE_GRADS, 100)
    assert placement == Placement(("cxl", "dram"))


def test_what_a_rule_asks_for_or_nobody_decided_is_left_to_the_rest():
    placer = decided({R.MOMENTUM: {"cxl": 1.0}})
    asked = placer.place(R.MOMENTUM, 100, tier="dram", source="rule 'x'")
    assert asked.tiers == ("dram", "cxl") and "rule 'x'" in asked.reason
    assert placer.place(R.ACTIVATIONS, 100).tiers == ("cxl", "dram")
