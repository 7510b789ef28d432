import logging

import pytest
import torch
from torch.nn import functional

from lightning_cxl.sequences import packed_mask
from lightning_cxl.sequences.packed_mask import PackedMask

CPU = torch.device("cpu")
ROWS = [[5, 1, 1, 3, 40, 2, 12], [30, 4, *[1] * 30], [64], [20, 44]]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(packed_mask, "_GROUP_TOKENS", 8)


def inputs(rows, dtype, heads=4):
    torch.manual_seed(0)
    shapes = [(len(rows), each, sum(rows[0]), 8) for each in (4, heads, heads)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attend(mask, rows, **options):
    """Return the result and the gradients of attention, transposed as models do it."""
    given = inputs(rows, torch.float64, heads=2 if options.get("enable_gqa") else 4)
    result = functional.scaled_dot_product_attention(*given, attn_mask=mask, **options)
    return result, *torch.autograd.grad(result, given, torch.linspace(-1, 1, result.numel()).double().view_as(result))


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"enable_gqa": True}, {"dropout_p": 0.0, "is_causal": False}])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 17, 63, 64, 100])
def test_attention_and_its_gradients_are_those_of_the_whole_mask(window, options, monkeypatch):
    whole = PackedMask(ROWS, CPU, window=window).whole()
    expected = attend(whole, ROWS, **options)
    monkeypatch.setattr(PackedMask, "whole", None)
    for found, wanted in zip(attend(PackedMask(ROWS, CPU, window=window), ROWS, **options), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_whole_mask_is_that_of_documents_and_window():
    mask = PackedMask([[2, 3]], CPU, window=2)
    assert mask.shape == (1, 1, 5, 5) and mask.dtype is torch.bool
    assert mask.whole()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_no_piece_is_long_but_for_one_document(monkeypatch):
    seen = []
    attention = functional.scaled_dot_product_attention

    def watched(query, key, value, attn_mask=None, **options):
        seen.append((query.shape[2], key.shape[2], options.get("is_causal", False)))
        assert options.get("is_causal") == (True if attn_mask is None else None)
        return attention(query, key, value, attn_mask=attn_mask, **options)

    mask = PackedMask([[5, 1, 1, 3, 40, 2, 12]], CPU)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    mask.attend(*inputs([[64]], torch.float32))
    assert seen == [(7, 7, False), (3, 3, True), (40, 40, True), (2, 2, True), (12, 12, True)]
    seen.clear()
    PackedMask([[40, 24]], CPU, window=10).attend(*inputs([[64]], torch.float32))
    assert seen == [(10, 10, False), *[(10, 20, False)] * 3, (10, 10, False), (10, 20, False), (4, 14, False)]


@pytest.mark.parametrize(
    "operation",
    [
        lambda mask: mask[:, :, :, :3],
        lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: mask.to(torch.float32),
        lambda mask: mask.expand(-1, 2, -1, -1),
        lambda mask: ~mask,
    ],
)
def test_any_other_operation_gets_the_whole_mask_and_the_log_says_so(operation, caplog, monkeypatch):
    monkeypatch.setattr(packed_mask, "_told", set())
    caplog.set_level(logging.INFO, logger="lightning_cxl")
    mask = PackedMask(ROWS, CPU, window=3)
    expected = operation(mask.whole())
    assert torch.equal(operation(mask), expected) and torch.equal(operation(mask), expected)
    assert len(caplog.records) == 1


def test_attention_of_other_shapes_gets_the_whole_mask():
    """As with a cache: one query, all keys."""
    mask = PackedMask([[64]], CPU)
    query, key, value = inputs([[64]], torch.float64)
    found = functional.scaled_dot_product_attention(query[:, :, -1:], key, value, mask[:, :, -1:])
    last = functional.scaled_dot_product_attention(query, key, value, mask)[:, :, -1:]
    torch.testing.assert_close(found, last)
    two = [each.expand(2, -1, -1, -1) for each in (query, key, value)]
    found = functional.scaled_dot_product_attention(*two, PackedMask([[20, 44]], CPU))  # of one row, for each of two
    expected = functional.scaled_dot_product_attention(query, key, value, PackedMask([[20, 44]], CPU))
    torch.testing.assert_close(found, expected.expand(2, -1, -1, -1))


def test_what_is_written_into_a_mask_counts():
    mask = PackedMask([[32, 32]], CPU)
    mask[..., 0] = True
    query, key, value = inputs([[64]], torch.float64)
    found = functional.scaled_dot_product_attention(query, key, value, mask)
    expected = functional.scaled_dot_product_attention(query, key, value, mask + False)
    assert torch.equal(found, expected)


def test_a_mask_is_held_between_forward_and_backward_as_it_is():
    mask = PackedMask(ROWS, CPU)
    assert mask.detach() is mask and mask.clone() is mask
    assert (mask._version, mask.is_inference(), mask.requires_grad) == (0, False, False)
