import pytest
import torch

from tests import apart


@pytest.mark.parametrize("slow", ["kernel", "h2d", "d2h"])
def test_each_kind_has_a_delay_of_its_own(slow):
    apart.set_delay(**{slow: 0.1})
    with apart.timeline() as entries:
        torch.zeros(4, pin_memory=True).to("apart", non_blocking=True).add(1).cpu()
    assert [entry.kind for entry in entries if entry.end - entry.start >= 0.1] == [slow]


def test_copies_overlap_kernels_of_another_stream_and_not_of_their_own(side):
    apart.set_delay(kernel=0.1, h2d=0.1)
    hosts = [torch.zeros(256, pin_memory=True) for _ in range(2)]
    x = torch.ones(4, device="apart")
    with apart.timeline() as entries:
        x.add_(1)
        with side:
            first = hosts[0].to("apart", non_blocking=True)
        second = hosts[1].to("apart", non_blocking=True)
    assert (first.shape, second.shape) == ((256,), (256,))
    kernel = next(e for e in entries if e.kind == "kernel")
    beside = next(e for e in entries if e.kind == "h2d" and e.stream == side.stream_id)
    behind = next(e for e in entries if e.kind == "h2d" and e.stream != side.stream_id)
    assert apart.overlap(kernel, beside) > 0
    assert apart.overlap(kernel, behind) == 0
