import math

import pytest
import torch
from adam_bench import problems
from adam_bench.problems import (
    Layout,
    Problem,
    filled,
    fits,
    format_count,
    one_tensor,
    parse_count,
)
from adam_bench.tensors import llama_tensors, small_tensors, zeroed


@pytest.mark.parametrize(
    ("text", "count", "shown"),
    [("1M", 10**6, "1M"), ("4096", 4096, "4.096K"), ("500k", 500_000, "500K"), ("1.5G", 1_500_000_000, "1.5G")],
)
def test_counts_are_read_and_written(text, count, shown):
    assert parse_count(text) == count
    assert format_count(count) == shown
    assert format_count(17) == "17"


def test_layouts_have_what_their_names_say():
    assert one_tensor(20_000_000) == Layout("20M", ((20_000_000,),))
    llama, small = llama_tensors(), small_tensors()
    assert (llama.label, len(llama.shapes)) == ("20M in 57 tensors", 57)
    assert (small.label, len(small.shapes)) == ("20M in 4882 tensors", 4882)
    for layout in (llama, small):
        assert 19.9e6 < layout.numel < 20.1e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filled_tensors_start_on_cache_lines_and_do_not_overlap(dtype):
    layout = Layout("odd", ((3, 5), (), (100_003,), (64,)))
    found = filled(layout, dtype, 0.01)
    assert [tuple(tensor.shape) for tensor in found] == list(layout.shapes)
    ends = [0]
    for tensor in found:
        assert tensor.dtype is dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 and tensor.data_ptr() >= ends[-1]
        ends.append(tensor.data_ptr() + tensor.numel() * tensor.element_size())
        assert tensor.isfinite().all()
    wide = found[2].float()
    assert wide.std() == pytest.approx(0.01, rel=0.02)
    # squares of what is not zero are no denormals either
    assert wide[wide != 0].abs().min() > math.sqrt(1.2e-38)
    assert (filled(layout, dtype, 0.01, positive=True)[2] >= 0).all()


def test_a_problem_has_gradients_and_float32_state():
    problem = Problem.make(Layout("two", ((4, 4), (7,))), torch.bfloat16)
    assert problem.numel == 23
    for parameter, gradient, *state in zip(
        problem.parameters, problem.gradients, problem.momentum, problem.variance, strict=True
    ):
        assert parameter.dtype is gradient.dtype is torch.bfloat16
        assert parameter.grad is gradient
        assert {tensor.dtype for tensor in state} == {torch.float32}
        assert {tensor.shape for tensor in state} == {parameter.shape}
    assert [(tensor.dtype, tensor.abs().sum().item()) for tensor in zeroed(problem.gradients, torch.int16)] == [
        (torch.int16, 0),
        (torch.int16, 0),
    ]


def test_what_does_not_fit_is_skipped_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr(problems, "host_available_bytes", lambda root: 3 << 30)
    assert fits(2 << 30, "this")
    assert capsys.readouterr().out == ""
    assert not fits((2 << 30) + 1, "that")
    assert capsys.readouterr().out == "skipped: that needs 2.0 GiB and 1.0 GiB to spare, 3.0 GiB are available\n"
