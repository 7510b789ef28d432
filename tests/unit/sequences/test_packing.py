import logging

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from lightning_cxl.errors import ConfigError
from lightning_cxl.sequences import packing
from lightning_cxl.sequences.packing import (
    PackedMask,
    fit_rows,
    lengths_of,
    pack_sequences,
    packed_arguments,
    separate,
    why_not_apart,
    without_first,
)
from tests.unit.sequences.models import VOCABULARY, tiny


@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_sequence_is_in_one_row_that_has_room_and_no_two_rows_fit_into_one(lengths):
    rows = fit_rows(lengths, 20)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    full = sorted(sum(lengths[number] for number in row) for row in rows)
    assert all(0 < tokens <= 20 for tokens in full)
    assert len(full) < 2 or full[0] + full[1] > 20
    assert rows == fit_rows(lengths, 20)


def test_the_fullest_row_with_room_is_filled_and_what_does_not_fit_is_refused():
    assert fit_rows([5, 3, 6, 2, 4], 10) == [[2, 4], [0, 1, 3]]
    for lengths in ([3, 0], [3, 11]):
        with pytest.raises(ConfigError, match="do not fit rows of 10"):
            fit_rows(lengths, 10)


def test_rows_say_where_sequences_begin():
    packed = pack_sequences([[1, 2, 3], [], [4, 5, 6, 7, 8, 9, 10], [11]], 5)
    assert packed == {
        "input_ids": [[4, 5, 6, 7, 8], [1, 2, 3, 9, 10], [11]],
        "labels": [[-100, 5, 6, 7, 8], [-100, 2, 3, -100, 10], [-100]],
        "position_ids": [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1], [0]],
    }


def test_labels_of_the_caller_stay_but_for_the_first_of_each_sequence():
    packed = pack_sequences([[1, 2, 3], [4, 5]], 5, labels=[[7, -100, 9], [8, 6]])
    assert packed["labels"] == [[-100, -100, 9, -100, 6]]


def test_wrong_requests_are_refused():
    with pytest.raises(ConfigError, match=r"tokens have \[1\] labels"):
        pack_sequences([[1, 2]], 5, labels=[[1]])
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        pack_sequences([[1, 2]], 0)


def test_lengths_and_labels_come_from_positions():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 1, 2]])
    assert lengths_of(positions).tolist() == [3, 2, 1, 2, 1, 3]
    ids = torch.arange(12).view(2, 6)
    assert without_first(ids, positions).tolist() == [[-100, 1, 2, -100, 4, -100], [-100, 7, -100, -100, 10, 11]]


CPU = torch.device("cpu")
ROWS = [[5, 1, 1, 3, 40, 2, 12], [30, 4, *[1] * 30], [64], [20, 44]]


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(packing, "_GROUP_TOKENS", 8)


def inputs(rows, dtype, heads=4):
    torch.manual_seed(0)
    shapes = [(len(rows), each, sum(rows[0]), 8) for each in (4, heads, heads)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attend(mask, rows, **options):
    """Return the result and the gradients of attention, transposed as models do it."""
    given = inputs(rows, torch.float64, heads=2 if options.get("enable_gqa") else 4)
    result = functional.scaled_dot_product_attention(*given, attn_mask=mask, **options)
    return result, *torch.autograd.grad(result, given, torch.linspace(-1, 1, result.numel()).double().view_as(result))


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"enable_gqa": True}, {"dropout_p": 0.0, "is_causal": False}])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 17, 63, 64, 100])
def test_attention_and_its_gradients_are_those_of_the_whole_mask(window, options, monkeypatch):
    whole = PackedMask(ROWS, CPU, window=window).whole()
    expected = attend(whole, ROWS, **options)
    monkeypatch.setattr(PackedMask, "whole", None)
    for found, wanted in zip(attend(PackedMask(ROWS, CPU, window=window), ROWS, **options), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.usefixtures("short_pieces")
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


@pytest.mark.usefixtures("short_pieces")
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


@pytest.mark.usefixtures("short_pieces")
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
    monkeypatch.setattr("lightning_cxl.sequences.chunked_loss._told", set())
    caplog.set_level(logging.INFO, logger="lightning_cxl")
    mask = PackedMask(ROWS, CPU, window=3)
    expected = operation(mask.whole())
    assert torch.equal(operation(mask), expected) and torch.equal(operation(mask), expected)
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("short_pieces")
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


@pytest.mark.usefixtures("short_pieces")
def test_what_is_written_into_a_mask_counts():
    mask = PackedMask([[32, 32]], CPU)
    mask[..., 0] = True
    query, key, value = inputs([[64]], torch.float64)
    found = functional.scaled_dot_product_attention(query, key, value, mask)
    expected = functional.scaled_dot_product_attention(query, key, value, mask + False)
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("short_pieces")
def test_a_mask_is_held_between_forward_and_backward_as_it_is():
    mask = PackedMask(ROWS, CPU)
    assert mask.detach() is mask and mask.clone() is mask
    assert (mask._version, mask.is_inference(), mask.requires_grad) == (0, False, False)


POSITIONS = torch.tensor([[*range(6), *range(9), 0, 0], [*range(3), *range(3), *range(3), *range(3), *range(5)]])
CHANGED = [(0, slice(0, 6)), (1, slice(3, 6)), (1, slice(12, 17))]
"""Sequences of which other tokens are taken: the first, one in the middle, and the last of a row."""
APART = ["Llama", "Gemma2", "Gemma3Text", "Granite", "Cohere", "Mistral", "Mixtral", "Qwen3", "Phi", "GPT2", "GPTNeoX"]


def tokens(seed):
    return torch.randint(3, VOCABULARY, POSITIONS.shape, generator=torch.Generator().manual_seed(seed))


def changed():
    """Return tokens, the same with some sequences changed, and where nothing was changed."""
    one = tokens(1)
    other, same = one.clone(), torch.ones_like(one, dtype=torch.bool)
    for where in CHANGED:
        other[where], same[where] = tokens(2)[where], False
    return one, other, same


@pytest.fixture(params=[4, 256], ids=["short pieces", "long pieces"])
def pieces(request, monkeypatch):
    """How many tokens of short documents are attended to together."""
    monkeypatch.setattr(packing, "_GROUP_TOKENS", request.param)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", APART)
def test_no_token_attends_to_another_sequence(family, implementation):
    if (family, implementation) == ("Gemma2", "sdpa"):
        pytest.skip("transformers has no sdpa for its capped attention")
    model = tiny(family, attention=implementation).eval()
    one, other, same = changed()
    arguments = packed_arguments(model, POSITIONS)
    assert ("attention_mask" in arguments) == (implementation == "sdpa")
    with torch.no_grad():
        before, after = (model(input_ids=ids, use_cache=False, **arguments).logits for ids in (one, other))
        alone = model(input_ids=one[:1, 6:15], use_cache=False).logits[0]
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[~same], after[~same])
    torch.testing.assert_close(before[0, 6:15], alone, rtol=1e-4, atol=1e-4)


BOTH = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("family", "options", "windows"),
    [
        ("Mistral", {}, [3]),
        ("Mistral", {"sliding_window": 16}, [16]),
        ("Mistral", {"sliding_window": 17}, [None]),  # no row is longer
        ("Mistral", {"sliding_window": None}, [None]),
        ("Qwen2Moe", {}, [None]),  # its config says 0
        ("Gemma3Text", BOTH, [3, None]),
        ("Qwen3", {"sliding_window": 3}, [None]),  # which it does not use
    ],
)
def test_windows_are_those_of_the_model(family, options, windows, monkeypatch):
    monkeypatch.setattr(packing, "_GROUP_TOKENS", 4)
    model = tiny(family, attention="sdpa", **options).eval()
    arguments, ids = packed_arguments(model, POSITIONS), tokens(1)
    mask = arguments["attention_mask"]
    masks = [mask[kind] for kind in BOTH["layer_types"]] if isinstance(mask, dict) else [mask]
    assert [each._window for each in masks] == windows
    with torch.no_grad():
        found = model(input_ids=ids, use_cache=False, **arguments).logits
        expected = model(input_ids=ids, use_cache=False, position_ids=POSITIONS).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_model_of_longer_rows_is_asked_again():
    model = tiny("Mistral", attention="sdpa", sliding_window=9)
    short = POSITIONS[:, :6]
    windows = [packed_arguments(model, each)["attention_mask"]._window for each in (short, POSITIONS, short)]
    assert windows == [None, 9, None]


class OwnLlama(transformers.LlamaForCausalLM):
    """May do with its mask what it likes."""


def of_the_user(model):
    model.__class__ = OwnLlama


def with_a_loss_of_routers(model):
    model.config.output_router_logits = True


def compiled(model):
    model.model.layers[1].compile(backend="eager")


def wrapped(model):
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")


def that_fails(model):
    def forward(attention_mask=None, **given):
        assert attention_mask is None
        return type(model).forward(model, attention_mask=attention_mask, **given)

    model.forward = forward


@pytest.mark.parametrize("change", [of_the_user, with_a_loss_of_routers, compiled, wrapped, that_fails])
def test_models_that_make_a_mask_of_their_own(change):
    model = tiny("Llama", attention="sdpa")
    change(model)
    assert list(packed_arguments(model, POSITIONS)) == ["position_ids"]


def test_positions_that_do_not_say_where_sequences_begin_are_refused():
    model = tiny("Llama", attention="sdpa")
    for wrong in ([[3, 4, 5, 0, 1]], [[0, 1, 2], [3, 4, 5]], [[0, 1, 3, 4]]):
        with pytest.raises(ConfigError, match="begin at 0 with each row"):
            packed_arguments(model, torch.tensor(wrong))


REFUSED = {
    "OPT": "its mask lets them attend",  # it makes a mask of ones, in which positions do not count
    "Falcon": "its mask lets them attend",
    "Bloom": "its mask lets them attend",
    "Mpt": "its mask lets them attend",  # its mask says what is not seen
    "Llama4Text": "chunks of its attention are counted from the beginning of the row",
    "Mamba": "a state that runs over the whole row",
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_keep_sequences_apart_is_found_and_said_once(family, caplog, monkeypatch):
    monkeypatch.setattr("lightning_cxl.sequences.chunked_loss._told", set())
    caplog.set_level(logging.INFO, logger="lightning_cxl")
    model = tiny(family)
    for _ in range(2):
        assert packed_arguments(model, POSITIONS) is None
    assert [REFUSED[family] in record.message for record in caplog.records] == [True]


def test_the_question_touches_no_block():
    model = tiny("Llama")
    for layer in model.model.layers:
        layer.forward = None
    assert why_not_apart(model) is None
    model.config._attn_implementation = "sdpa_of_my_own"  # not known to transformers: no mask at all
    assert "attend to each other" in why_not_apart(model)


def test_the_question_leaves_the_random_state_alone():
    model, before = tiny("GPT2", embd_pdrop=0.5), torch.get_rng_state()
    assert why_not_apart(model) is None
    assert torch.equal(torch.get_rng_state(), before)


def with_state(model):
    model._is_stateful = True


def with_a_later_layer_of_state(model):
    model.config.layer_types = ["full_attention", "linear_attention"]  # the first block, which is asked, has attention


def that_needs_more_than_tokens(model):
    model.forward = lambda input_ids, position_ids, token_type_ids, **others: None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (with_state, "a state that runs over the whole row"),
        (with_a_later_layer_of_state, "a state that runs over the whole row"),
        (that_needs_more_than_tokens, "cannot be asked with tokens and positions alone (TypeError: "),
    ],
)
def test_why_a_model_cannot_keep_sequences_apart(change, why):
    change(model := tiny("Llama"))
    assert why in why_not_apart(model)
    assert why_not_apart(nn.Linear(2, 2)) == "it is no model of transformers"


def test_flash_attention_is_told_where_sequences_begin_in_all_rows(monkeypatch):
    """With a kernel of the test in the place of flash attention's; transformers' own code calls it."""
    from transformers import modeling_flash_attention_utils as flash

    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, **options):
        assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k == 9
        sizes = torch.diff(cu_seqlens_q).tolist()
        parts = zip(*(each.transpose(0, 1).split(sizes, 1) for each in (q, k, v)), strict=True)
        return torch.cat(
            [functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts], 1
        ).transpose(0, 1)

    def process(query_length, key_length, is_causal, max_seqlen_q=None, max_seqlen_k=None, **options):
        return {"causal": is_causal, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}

    functions = (None, varlen, None, None, None), (process, None)
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda implementation: functions)
    model, ids = tiny("Llama", attention="sdpa").eval(), tokens(1)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False, **packed_arguments(model, POSITIONS)).logits
        model.config._attn_implementation = "flash_attention_2"
        found = model(input_ids=ids, use_cache=False, **packed_arguments(model, POSITIONS)).logits
    torch.testing.assert_close(found, expected)


def test_separate_gives_each_sequence_with_labels_a_row():
    ids = torch.arange(10).view(2, 5) + 10
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 0, 0]])
    labels = ids.masked_fill(positions == 0, -100)
    labels[0, 4] = -100
    found, own = separate(ids, labels, positions)
    assert found.tolist() == [[10, 11, 12], [15, 16, 17]]
    assert own.tolist() == [[-100, 11, 12], [-100, 16, 17]]
