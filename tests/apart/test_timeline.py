import pytest
import torch

from tests import apart


@pytest.mark.parametrize("slow", ["kernel", "h2d", "d2h"])
def test_each_kind_has_a_delay_of_its_own(slow):
    apart.set_delay(**{slow: 0.1})
    with apart.timeline() as entries:
        torch.zeros(4, pin_memory=True).to("apart", non_blocking=True).add(1).cpu()
    assert [entry.kind for entry in entries if entry.end - entry.start >= 0.1] == [slow]
