import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from lightning_cxl.errors import ConfigError
from lightning_cxl.sequences import packing
from lightning_cxl.sequences.chunked_loss import tell_once
from lightning_cxl.sequences.packing import fit_rows, lengths_of, pack_sequences, packed_arguments, why_not_apart
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
    packed = pack_sequences([[1, 2, 3], [4, 5]], 5, labels=[[7, -100, 9], [8, 6]])
    assert packed["labels"] == [[-100, -100, 9, -100, 6]], "labels of the caller stay"
    assert lengths_of(torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 1, 2]])).tolist() == [3, 2, 1, 2, 1, 3]


POSITIONS = torch.tensor([[*range(6), *range(9), 0, 0], [*range(3), *range(3), *range(3), *range(3), *range(5)]])
CHANGED = [(0, slice(0, 6)), (1, slice(3, 6)), (1, slice(12, 17))]
"""Sequences of which other tokens are taken: the first, one in the middle, and the last of a row."""
APART = ["Llama", "Gemma2", "Gemma3Text", "Granite", "Cohere", "Mistral", "Mixtral", "Qwen3", "Phi", "GPT2", "GPTNeoX"]


def tokens(seed):
    return torch.randint(3, VOCABULARY, POSITIONS.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", APART)
def test_no_token_attends_to_another_sequence(family, implementation):
    if (family, implementation) == ("Gemma2", "sdpa"):
        pytest.skip("transformers has no sdpa for its capped attention")
    model = tiny(family, attention=implementation).eval()
    one = tokens(1)
    other, same = one.clone(), torch.ones_like(one, dtype=torch.bool)
    for where in CHANGED:
        other[where], same[where] = tokens(2)[where], False
    arguments = packed_arguments(model, POSITIONS)
    with torch.no_grad():
        before, after = (model(input_ids=ids, use_cache=False, **arguments).logits for ids in (one, other))
        alone = model(input_ids=one[:1, 6:15], use_cache=False).logits[0]
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[~same], after[~same])
    torch.testing.assert_close(before[0, 6:15], alone, rtol=1e-4, atol=1e-4)


def test_positions_that_do_not_say_where_sequences_begin_are_refused(monkeypatch):
    model = tiny("Llama", attention="sdpa")
    monkeypatch.setattr(packing, "why_not_apart", lambda model: None)
    model.config._attn_implementation = "flash_attention_2"
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
def test_a_model_that_cannot_keep_sequences_apart_is_found_and_said_once(family, caplog):
    tell_once.cache_clear()
    caplog.set_level(logging.INFO, logger="lightning_cxl")
    model = tiny(family)
    for _ in range(2):
        assert packed_arguments(model, POSITIONS) is None
    assert [REFUSED[family] in record.message for record in caplog.records] == [True]


def test_the_question_touches_no_block_and_leaves_the_random_state_alone():
    model, before = tiny("GPT2", embd_pdrop=0.5), torch.get_rng_state()
    for layer in model.transformer.h:
        layer.forward = None
    assert why_not_apart(model) is None
    assert torch.equal(torch.get_rng_state(), before)
    model.config._attn_implementation = "sdpa_of_my_own"  # not known to transformers: no mask at all
    assert "attend to each other" in why_not_apart(model)


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
    found, own = packing.separate(ids, labels, positions)
    assert found.tolist() == [[10, 11, 12], [15, 16, 17]]
    assert own.tolist() == [[-100, 11, 12], [-100, 16, 17]]


LAYERS = ["full_attention", "linear_attention"]  # the first block, which is asked, has attention


def that_needs_more_than_tokens(model):
    model.forward = lambda input_ids, position_ids, token_type_ids, **others: None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: setattr(model, "_is_stateful", True), "a state that runs over the whole row"),
        (lambda model: setattr(model.config, "layer_types", LAYERS), "a state that runs over the whole row"),
        (that_needs_more_than_tokens, "cannot be asked with tokens and positions alone (TypeError: "),
    ],
)
def test_why_a_model_cannot_keep_sequences_apart(change, why):
    change(model := tiny("Llama"))
    assert why in why_not_apart(model)
    assert why_not_apart(nn.Linear(2, 2)) == "it is no model of transformers"
