"""Weights that ranks share: what is refused, what is left, and what happens when a rank is killed."""

import pytest

from tests.integration import shared_host
from tests.integration.shared_host_run import OTHERS

pytestmark = pytest.mark.slow
CASES = ("plain", *OTHERS)


def results(case):
    found = shared_host.results(case, CASES)
    assert len(found) == (1 if case == "killed" else 2)
    return found


def test_ranks_on_several_machines_are_refused_and_gather():
    for raised, (asked, auto), losses in results("elsewhere"):
        name, message = raised
        assert name == "UnsupportedError" and "rank 1 of the group runs in another machine (`far`)" in message
        assert "share_weights=False" in message and "HSDP" in message
        assert asked[0] == "UnsupportedError" and asked[1].startswith("share_weights=True cannot be honoured: rank 1")
        assert auto[0] is False and auto[1].startswith("weights are gathered between ranks: rank 1 of the group runs")
        assert losses == results("plain")[0][0][0] or losses == results("plain")[1][0][0]


def test_what_is_asked_for_or_faster_is_chosen():
    first, second = results("chosen")
    assert first == second
    assert [shares for shares, _ in first] == [False, True, True, False, False]
    reasons = [reason for _, reason in first]
    assert reasons[2].startswith("weights come together by shared host memory: 4.00 GB/s")
    assert reasons[3].startswith("weights come together by gathers between ranks: 2.00 GB/s")
    assert reasons[4] == "weights are gathered between ranks: cannot open the memory of another process"


def test_a_full_tier_of_one_rank_is_an_error_of_all():
    for (name, message), losses in results("full"):
        assert name == "TierFullError"
        assert message.startswith("rank 1 of the group: cannot place") and "on node 0 of tier `dram`" in message
        assert losses in [losses for ((losses, *_), _) in results("plain")]


def test_a_machine_holds_and_counts_weights_once():
    found = results("counted_once")
    shards, held, shown = (sum(numbers) for numbers in zip(*found, strict=True))
    assert shards > 2**20
    # counters, alignment and padding take some pages
    assert shards <= held <= shards + len(found) * 32 * 1024
    assert shards <= shown <= held + len(found) * 16 * 1024


def test_both_ways_are_measured_and_all_ranks_agree():
    (found, seconds), (other, _) = results("measured")
    assert found == other and found.nbytes == 16 * 2**20
    assert 0 < found.shared < seconds and 0 < found.peers < seconds
    # on the CPU a copy is faster than sending, however busy the machine is
    assert found.shares_weights and seconds < 20


def test_shards_that_were_replaced_are_refused():
    for name, message in results("misuse"):
        assert name == "ValueError" and "has been replaced" in message


def test_all_segments_are_page_locked_until_they_are_closed():
    for calls in results("locked"):
        assert [call[0] for call in calls] == ["lock", "lock", "unlock", "unlock"]
        assert calls[0][2] == calls[1][2] > 2**15
        assert [call[1] for call in calls[2:]] == [call[1] for call in calls[:2]]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("moved", "PinnedMemoryError: rank 1 of the group: page-locking moved"),
        ("unwatched", "UnsupportedError: rank 1 of the group: cannot watch rank 0"),
    ],
)
def test_what_one_rank_cannot_do_leaves_nothing_on_any(case, message):
    for raised, left, losses in results(case):
        assert ": ".join(raised).startswith(message)
        assert left == 0
        assert losses in [losses for ((losses, *_), _) in results("plain")]


def test_a_rank_that_is_killed_is_named_within_seconds():
    ((raised, seconds),) = results("killed")
    name, message = raised
    assert name == "LostRankError" and message.startswith("rank 1 (process ")
    assert "has ended" in message and "come to a gather of unit" in message
    assert seconds < 30, "no timeout is waited for"
