"""Weights in memory that the ranks of a machine share: the same bits as FSDP2 with its gathers, and no gather."""

import pytest

from tests.integration import shared_host
from tests.integration.shared_host_run import PARITY

pytestmark = pytest.mark.slow
CASES = {2: tuple(PARITY), 4: ("all_at_once", "scalars", "whole_numbers", "hsdp")}
"""By number of ranks."""


def results(case, ranks=2):
    found = shared_host.results(case, CASES[ranks], ranks)
    assert len(found) == ranks
    return found


@pytest.mark.parametrize(
    ("case", "ranks"), [*((case, 2) for case in PARITY), *((case, 4) for case in CASES[4])], ids=str
)
def test_losses_and_weights_are_those_of_fsdp2_bit_for_bit(case, ranks):
    for result in results(case, ranks):
        gathers, shared_gathers = shared_host.assert_same_bits(result)
        assert gathers > 0 and shared_gathers == 0


def test_what_a_forward_shards_anew_over_fewer_ranks_is_gathered():
    found = shared_host.results("resharded", ("resharded",), 4)
    assert len(found) == 4
    for result in found:
        gathers, shared_gathers = shared_host.assert_same_bits(result)
        assert shared_gathers == gathers // 2  # in the backward


def test_ranks_train_on_their_own_data():
    first, second = results("plain")
    assert first[0][0] != second[0][0] and first[0][0][0] != first[0][0][-1]
