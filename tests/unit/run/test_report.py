"""Planned bytes by tier, and what is refused before anything is allocated."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import TierFullError
from lightning_cxl.inventory.plan import list_tensors
from lightning_cxl.inventory.tensors import Workload
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.placement import Placement, Placer, TensorRole
from lightning_cxl.planning.decide import check_fits

ROLE = TensorRole.MOMENTUM
SPLIT = Placement(("dram", "cxl"), shares=(0.8, 0.2))
SPILLING = Placement(("dram", "cxl", "far"), shares=(0.8, 0.2, 0.0))


def test_a_plan_reports_every_tier_of_a_split() -> None:
    plan = list_tensors(nn.Linear(1000, 1), None, OffloadConfig(), Workload(batch=1, sequence=1))
    splits, reasons = {ROLE: {"dram": 0.8, "cxl": 0.2}}, {ROLE: "both are busy"}
    placer = Placer(Topology.fake(("1GiB",), ("1GiB",)), lambda: {"dram": 1, "cxl": 1}, splits=splits, reasons=reasons)
    report = replace(plan, placer=placer).report()
    # 1000 weights and a bias of 4 bytes, each split by itself
    assert report["planned_roles"]["momentum"] == {"dram": 3203, "cxl": 801}
    assert report["planned_roles"]["variance"] == {"dram": 4004}
    assert [text.partition(" (")[0] for text in report["reasons"]["momentum"]] == ["dram 80 %, cxl 20 %"]


@given(st.integers(0, 2**50), st.lists(st.integers(1, 1000), min_size=1, max_size=5))
def test_parts_add_up_to_the_whole_and_follow_the_shares(nbytes, weights) -> None:
    shares = tuple(weight / sum(weights) for weight in weights)
    sizes = Placement(tuple(f"t{i}" for i in range(len(weights))), shares=shares).split_bytes(nbytes)

    assert sum(sizes.values()) == nbytes
    for size, share in zip(sizes.values(), shares, strict=True):
        assert size >= 0
        assert size == pytest.approx(nbytes * share, abs=2 + 1e-9 * nbytes)


def test_each_tier_needs_room_for_its_fraction_only() -> None:
    for mode in ("error", "spill"):
        check_fits([(ROLE, 100, SPLIT)], {"dram": 80, "cxl": 20}, mode)
    with pytest.raises(TierFullError, match=r"momentum \(100 B of 100 B to place now\) on tier `dram` and `cxl`: free"):
        check_fits([(ROLE, 100, SPLIT)], {"dram": 500, "cxl": 19}, "error")


def test_what_does_not_fit_goes_on_as_it_does_in_host_memory() -> None:
    full = Placement(("dram",))
    check_fits([(ROLE, 100, SPLIT), (ROLE, 10, full)], {"dram": 100, "cxl": 10}, "spill")  # 90 and 10, then 10
    with pytest.raises(TierFullError):
        check_fits([(ROLE, 100, SPLIT), (ROLE, 11, full)], {"dram": 100, "cxl": 10}, "spill")
    check_fits([(ROLE, 100, SPILLING), (ROLE, 99, full)], {"dram": 99, "cxl": 0, "far": 100}, "spill")
    with pytest.raises(TierFullError, match="`dram` and `cxl` or any other"):
        check_fits([(ROLE, 100, SPILLING)], {"dram": 50, "cxl": 40, "far": 99}, "spill")
    with pytest.raises(TierFullError, match="on tier `dram`: free"):
        check_fits([(ROLE, 100, full)], {"dram": 99, "cxl": 500}, "spill")
