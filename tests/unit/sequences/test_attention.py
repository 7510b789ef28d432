import logging

import pytest
import torch
import transformers
from torch.nn import functional

from lightning_cxl.errors import ConfigError
from lightning_cxl.sequences import attention, packed_mask
from lightning_cxl.sequences.attention import packed_arguments, separate, why_not_apart
from tests.unit.sequences.models import VOCABULARY, tiny

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
    monkeypatch.setattr(packed_mask, "_GROUP_TOKENS", request.param)


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
    monkeypatch.setattr(packed_mask, "_GROUP_TOKENS", 4)
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
    monkeypatch.setattr(attention, "_told", set())
    caplog.set_level(logging.INFO, logger="lightning_cxl")
    model = tiny(family)
    for _ in range(2):
        assert packed_arguments(model, POSITIONS) is None
    assert [REFUSED[family] in record.message for record in caplog.records] == [True]


def test_a_state_anywhere_in_the_model_is_enough():
    """The first block, which is asked, may be one with attention."""
    model = tiny("Llama")
    model._is_stateful = True
    assert "a state that runs over the whole row" in why_not_apart(model)
    model = tiny("Llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert "a state that runs over the whole row" in why_not_apart(model)


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


def test_a_model_that_needs_more_than_tokens_is_refused():
    model = tiny("Llama")
    model.forward = lambda input_ids, position_ids, token_type_ids, **others: None
    assert "cannot be asked with tokens and positions alone (TypeError: " in why_not_apart(model)


def test_anything_but_a_model_of_transformers_is_refused():
    assert why_not_apart(torch.nn.Linear(2, 2)) == "it is no model of transformers"


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
