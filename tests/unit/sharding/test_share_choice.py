"""Shared memory or peers: what measured seconds say."""

import pytest

from lightning_cxl.sharding.share_choice import GatherSeconds

GB = 10**9


@pytest.mark.parametrize(
    ("shared", "peers", "shares", "text"),
    [
        (2.0, 1.0, False, "gathers between ranks: 8.00 GB/s, shared host memory 4.00 GB/s (measured)"),
        (1.0, 2.0, True, "shared host memory: 8.00 GB/s, gathers between ranks 4.00 GB/s (measured)"),
        (2.0, 2.0, True, "shared host memory: 4.00 GB/s, gathers between ranks 4.00 GB/s (measured)"),
    ],
)
def test_the_faster_way_is_taken_and_said(shared, peers, shares, text):
    found = GatherSeconds(8 * GB, shared, peers)
    assert found.shares_weights is shares
    assert found.explain() == f"weights come together by {text}"
