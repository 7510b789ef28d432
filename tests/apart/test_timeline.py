"""What the timeline says, and the delays that it shows."""

import time

import pytest
import torch

from tests import apart


def test_kernels_and_copies_are_listed_with_all_there_is_to_know(side):
    host = torch.zeros(256, pin_memory=True)
    before = time.perf_counter()
    with apart.timeline() as entries:
        there = host.to("apart", non_blocking=True)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            doubled = there * 2
            host.copy_(doubled, non_blocking=True)
        del there, doubled
    after = time.perf_counter()
    h2d, kernel, d2h = entries
    assert h2d[:5] == (0, 0, "h2d", "copy_", 1024)
    assert kernel[:4] == (0, side.stream_id, "kernel", "aten::mul")
    assert kernel.nbytes == 2 * 1024 + 8  # two tensors and a number
    assert d2h[:5] == (0, side.stream_id, "d2h", "copy_", 1024)
    for entry in entries:
        assert before <= entry.queued <= entry.start <= entry.end <= after
    assert h2d.end <= kernel.start <= kernel.end <= d2h.start
    torch.ones(1, device="apart")
    torch.accelerator.synchronize()
    assert len(entries) == 3


@pytest.mark.parametrize("slow", ["kernel", "h2d", "d2h"])
def test_each_kind_has_a_delay_of_its_own(slow):
    apart.set_delay(**{slow: 0.1})
    with apart.timeline() as entries:
        torch.zeros(4, pin_memory=True).to("apart", non_blocking=True).add(1).cpu()
    spans = {entry.kind: entry.end - entry.start for entry in entries}
    assert spans[slow] >= 0.1
    assert spans[slow] == max(spans.values())
    assert sum(entry.end - entry.start >= 0.1 for entry in entries) == 1


def test_copies_overlap_kernels_of_another_stream_and_not_of_their_own(side):
    apart.set_delay(kernel=0.1, copy=0.1)
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


def test_devices_are_told_apart():
    with apart.timeline() as entries:
        torch.ones(4, device="apart:1")
    assert [(e.device, e.name) for e in entries] == [(1, "aten::fill_")]
