"""A rank that is late, where it would read or write shared weights at the wrong moment: the same bits as FSDP2."""

import pytest

from tests.integration.shared_host import assert_same_bits, results
from tests.integration.shared_host_run import LATE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", LATE)
def test_a_late_rank_changes_nothing(case):
    found = results(case, tuple(LATE))
    assert len(found) == 2
    for result in found:
        assert_same_bits(result)
