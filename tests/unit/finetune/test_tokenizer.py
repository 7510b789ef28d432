from pathlib import Path

import pytest

from lightning_cxl.finetune import data as module
from lightning_cxl.finetune.data import cached_tokenizer, train_tokenizer

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "class A:\n    pass\n" * 20]


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x", "naïve 漢字 🙂\x00", "", "  leading and trailing  "])
def test_any_text_survives_encoding_and_decoding(text):
    tokenizer = train_tokenizer(TEXTS, 300)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(token < 300 for token in ids)


def test_training_learns_merges_and_keeps_the_vocabulary_bound():
    tokenizer = train_tokenizer(TEXTS, 280)
    assert len(tokenizer) == 280
    assert len(tokenizer("def f(x)")["input_ids"]) < len("def f(x)")
    assert tokenizer.eos_token == "<|endoftext|>"


def test_the_cache_is_used_per_corpus_and_size(monkeypatch):
    first = cached_tokenizer(TEXTS, 280, "key")
    assert len(cached_tokenizer(TEXTS, 270, "key")) == 270

    def refuse(*_):
        raise AssertionError("trained again")

    monkeypatch.setattr(module, "train_tokenizer", refuse)
    assert cached_tokenizer([], 280, "key").get_vocab() == first.get_vocab()
    with pytest.raises(AssertionError, match="trained again"):
        cached_tokenizer(TEXTS, 280, "other")


def test_a_failed_save_leaves_nothing_behind(cache, monkeypatch):
    class Unsavable:
        def save_pretrained(self, folder):
            Path(folder).mkdir()
            Path(folder, "half").write_text("")
            raise OSError(28, "no space left")

    monkeypatch.setattr(module, "train_tokenizer", lambda *_: Unsavable())
    with pytest.raises(OSError, match="no space"):
        cached_tokenizer(TEXTS, 280, "key")
    assert list((cache / "tokenizers").iterdir()) == []
