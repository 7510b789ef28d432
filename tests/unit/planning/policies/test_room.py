"""Bytes that tiers are handed out in: whole ones, and none is lost."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.planning.policies.room import in_whole_bytes


@given(st.integers(0, 2**44), st.lists(st.floats(1e-6, 1), min_size=1, max_size=5))
def test_parts_are_whole_and_add_up(nbytes, weights):
    split = {f"tier{i}": weight / sum(weights) for i, weight in enumerate(weights)}
    parts = in_whole_bytes(nbytes, split)
    assert sum(parts.values()) == nbytes
    for tier, part in parts.items():
        assert isinstance(part, int)
        assert abs(part - split[tier] * nbytes) < 1
