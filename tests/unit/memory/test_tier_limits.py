"""What a process may take of each tier: a budget, its part of a shared machine, or all."""

import pytest

from lightning_cxl.errors import ConfigError, TierNotFoundError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.stacks import TierLimits

GIB = 1 << 30


def test_a_budget_wins_over_the_part_of_a_shared_machine():
    topology = Topology.fake(dram=("8GiB",), cxl=("4GiB",))
    limits = TierLimits(topology, {"dram": GIB}, {"dram": 2 * GIB, "cxl": 3 * GIB})
    dram, cxl = topology.tiers
    assert (limits.of(dram), limits.of(cxl)) == (GIB, 3 * GIB)
    assert limits.has_budget(dram) and not limits.has_budget(cxl)
    assert TierLimits(topology).of(cxl) == 4 * GIB


def test_dram_that_stands_in_for_a_card_is_limited_as_dram():
    topology = Topology.fake(dram=("8GiB",), cxl=())
    with pytest.warns(match="backed by DRAM"):
        emulated = topology.tier("cxl")
    assert TierLimits(topology, {}, {"dram": 2 * GIB}).of(emulated) == 2 * GIB
    assert TierLimits(topology, {"dram": GIB}).of(emulated) == 8 * GIB, "a budget is for bytes under its name"


def test_budgets_that_mean_nothing_are_refused():
    topology = Topology.fake()
    with pytest.raises(ConfigError, match="must not be negative"):
        TierLimits(topology, {"dram": -1})
    with pytest.raises(TierNotFoundError, match="hbm"):
        TierLimits(topology, {"hbm": 1})
