"""Splits are handed out in whole bytes, and none is lost."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.machine.topology import TierKind
from lightning_cxl.planning.policies import get_policy, in_whole_bytes
from tests.unit.planning.policies.jobs import R, job_of, machine, tier


@given(st.integers(0, 2**44), st.lists(st.floats(1e-6, 1), min_size=1, max_size=5))
def test_parts_are_whole_and_add_up(nbytes, weights):
    split = {f"tier{i}": weight / sum(weights) for i, weight in enumerate(weights)}
    parts = in_whole_bytes(nbytes, split, dict.fromkeys(split, 2**62))
    assert sum(parts.values()) == nbytes
    for name, part in parts.items():
        assert isinstance(part, int)
        assert abs(part - split[name] * nbytes) <= 1


@pytest.mark.parametrize("gib", [0, 2**30])
def test_a_full_tier_is_not_rounded_up(gib):
    """Its share is a little more than it has, since the last half byte of a split is spread over all its tiers."""
    host = host_of((TierKind.DRAM, 2 + 8 * gib, 8), (TierKind.CXL, 100 + 8 * gib, 1), (TierKind.CXL, 100 + 8 * gib, 1))
    get_policy("interleave").decide(job_of({R.MOMENTUM: 3 + 10 * gib}), host)


def test_nor_is_one_of_two_sockets():
    cards = [(TierKind.CXL, 100, 1)] * 3
    host = host_of((TierKind.DRAM, 3, 2), (TierKind.DRAM, 10, 1), *cards)
    get_policy("latency_first").decide(job_of({R.MOMENTUM: 21}), host)


def host_of(*tiers):
    """Return a machine with tiers of a kind, bytes and nodes."""
    made = [
        replace(tier(f"tier{i}", kind, capacity, 1e11, 1e11, 1e11), num_nodes=num_nodes)
        for i, (kind, capacity, num_nodes) in enumerate(tiers)
    ]
    return machine(tiers=tuple(made))
