import os
import socket
from itertools import chain
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import processors
from torch.utils.data import DistributedSampler

from lightning_cxl.config import cache_folder
from lightning_cxl.errors import CheckpointError, ConfigError, LightningCXLWarning
from lightning_cxl.finetune.data import (
    FALLBACK_TEMPLATE,
    IGNORED,
    SampleLoader,
    TextData,
    find_files,
    tokenize,
    trained_tokenizer,
)
from lightning_cxl.sequences.packing import separate
from tests.unit.finetune.chats import CHATML, REWRITES, by_hand, byte_tokenizer


@pytest.mark.parametrize("ends", [False, True])
def test_long_documents_are_pieces_with_the_special_tokens_of_their_tokenizer_and_one_end(ends):
    tokenizer = byte_tokenizer(bos_token="<|im_start|>")
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<|im_start|> $A{' <|endoftext|>' if ends else ''}",
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<|im_start|>", "<|endoftext|>")],
    )
    samples = tokenize({"text": ["ab", "abcdef", "abc"]}, tokenizer, 4, "answers", by_line=False)
    pieces = ["<|im_start|>ab<|endoftext|>", "<|im_start|>abc", "def<|endoftext|>", "<|im_start|>abc"]
    assert tokenizer.batch_decode(samples["input_ids"]) == pieces  # a last piece of one token has nothing to learn
    assert samples["labels"] == samples["input_ids"] and samples["length"] == [4, 4, 4, 4]


def test_split_is_disjoint_stable_and_as_large_as_asked_and_needs_no_network(data, text_folder, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("used the network"))
    data.setup()
    train, val = (data._split[part]["input_ids"][:] for part in ("train", "test"))
    assert len(val) == round(0.2 * (len(train) + len(val)))
    again = TextData(f"{text_folder}/**/*.txt", seq_len=16, batch_size=2, vocab_size=300, val_fraction=0.2, seed=9)
    again.setup()
    assert all(map(torch.equal, again._split["test"]["input_ids"][:], val))


def test_prepared_data_is_opened_from_the_cache_until_something_changes(data, text_folder, cache):
    def files():
        return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.suffix in (".arrow", ".json")}

    data.prepare_data()
    prepared = files()
    data.setup()
    assert len(data.train_dataloader()) > 1
    assert files() == prepared
    options = {"batch_size": 2, "vocab_size": 300}
    for changed in ({"seq_len": 8}, {"seq_len": 8, "train_on": "all"}):
        before = files()
        TextData(f"{text_folder}/**/*.txt", **options, **changed).setup()
        assert len(files()) == len(before) + 1  # of the same text and tokenizer
    before = files()
    (text_folder / "00.txt").write_text("changed text " * 50)
    TextData(f"{text_folder}/**/*.txt", **options, seq_len=8).setup()
    assert any(path.parent.name == "tokenizers" for path in files().keys() - before.keys())


def turns(number):
    return {"prompt": f"What is {number}?", "completion": "It is " + "very " * (number % 4) + f"{number}."}


def pairs(loader):
    """Return (ids, labels) of every sample, without what was padded."""
    found = []
    for batch in loader:
        for ids, labels in zip(*separate(*batch.values()), strict=True):
            end = int((labels != -100).nonzero()[-1]) + 1
            found.append((tuple(ids[:end].tolist()), tuple(labels[:end].tolist())))
    return found


def test_conversations_are_batches_with_labels_where_the_assistant_speaks(write_lines, chat_tokenizer):
    rows = [turns(number) for number in range(10)]
    path = write_lines(*rows[:3], "", *rows[3:])
    data = TextData(str(path), seq_len=100, batch_size=2, val_fraction=0.2, tokenizer_name_or_path=chat_tokenizer)
    data.setup()
    expected = set()
    for row in rows:
        asked = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        ids, labels = by_hand(data.tokenizer, asked, (row["completion"] + "<|im_end|>",))
        expected.add((tuple(ids), tuple(labels)))
    train, val = pairs(data.train_dataloader()), pairs(data.val_dataloader())
    assert (len(train), len(val)) == (8, 2)
    assert set(train) | set(val) == expected


def test_few_conversations_have_a_row_each_and_many_share_rows(write_lines, chat_tokenizer):
    path = write_lines(*(turns(number) for number in range(12)))
    kept = {}
    for batch_size in (1, 6):
        options = {"seq_len": 128, "val_fraction": 0.34, "tokenizer_name_or_path": chat_tokenizer}
        data = TextData(str(path), batch_size=batch_size, **options)
        data.setup()
        batches = [*data.train_dataloader(), *data.val_dataloader()]
        kept[batch_size] = max(batch["input_ids"].shape[1] for batch in batches)
        assert len(set(pairs(data.train_dataloader()) + pairs(data.val_dataloader()))) == 12
    assert kept[6] < 64 < kept[1] <= 128


def test_long_conversations_lose_their_end_and_those_without_an_answer_are_left_out(write_lines, chat_tokenizer):
    rows = [turns(0), turns(1), {"prompt": "a" * 90, "completion": "gone"}, {"prompt": "Hi", "completion": "b" * 90}]
    path = write_lines(*rows)
    data = TextData(str(path), seq_len=64, batch_size=1, val_fraction=0.3, tokenizer_name_or_path=chat_tokenizer)
    message = "of 4 samples 2 are longer than 64 tokens and lose their end; 1 have no answer .* longest has 115 tokens"
    with pytest.warns(LightningCXLWarning, match=message):
        data.setup()
    samples = pairs(data.train_dataloader()) + pairs(data.val_dataloader())
    assert sorted(len(ids) for ids, _ in samples) == [38, 43, 64]


def test_without_a_model_a_tokenizer_is_trained_on_the_conversations(write_lines):
    path = write_lines(*(turns(number) for number in range(8)))
    data = TextData(str(path), seq_len=100, batch_size=2, vocab_size=300)
    data.setup()
    assert data.tokenizer.chat_template == FALLBACK_TEMPLATE
    assert len(data.tokenizer("### Assistant:\n")["input_ids"]) < 10
    ids, labels = pairs(data.val_dataloader())[0]
    said = [token for token in labels if token != -100]
    assert data.tokenizer.decode(ids).startswith("### User:\nWhat is ")
    assert data.tokenizer.decode(said).startswith("It is ") and said[-1] == data.tokenizer.eos_token_id


def test_documents_may_come_in_lines(write_lines, text_folder):
    files = sorted(text_folder.rglob("*.txt"))
    path = write_lines("", *({"text": file.read_text()} for file in files), name="documents.jsonl")
    options = {"seq_len": 16, "batch_size": 2, "vocab_size": 300}
    from_lines, from_files = (TextData(list(map(str, names)), **options) for names in ([path], files))
    from_lines.setup()
    from_files.setup()
    assert from_lines.tokenizer.get_vocab() == from_files.tokenizer.get_vocab()
    found, expected = (
        {tuple(ids.tolist()) for ids in chain(*(part["input_ids"] for part in each._split.values()))}
        for each in (from_lines, from_files)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([turns(1), "", turns(2), {"prompt": "Hi"}], CHATML, r'line `\{"prompt": "Hi"\}` is refused: expected one'),
        ([{"text": "a"}, {"text": 3}], CHATML, r'line `\{"text": 3\}` is refused'),
        ([turns(1), turns(2)], REWRITES, r"What is \d.*not found in its text"),
        ([turns(1)], "{{ raise_exception('must alternate') }}", r"What is 1.* the conversation: must alternate"),
    ],
)
def test_an_error_in_a_line_shows_it(write_lines, tmp_path, rows, template, message):
    byte_tokenizer(template).save_pretrained(tmp_path / "tokenizer")
    data = TextData(str(write_lines(*rows)), tokenizer_name_or_path=str(tmp_path / "tokenizer"))
    with pytest.raises(ConfigError, match=message):
        data.setup()


def test_text_and_conversations_are_not_mixed(write_lines, text_folder):
    path = write_lines(turns(1))
    with pytest.raises(ConfigError, match=r"chat\.jsonl` has lines of JSON, .*\.txt` has not"):
        TextData([str(path), f"{text_folder}/00.txt"]).setup()


def test_a_held_out_sample_has_a_prompt_and_a_label_that_nothing_predicts_is_no_answer(data):
    """Nothing can be generated from no token."""
    ids = list(range(20))
    labels = [ids[:end] + [IGNORED] * (20 - end) for end in (18, 4)]
    data._split = {"test": Dataset.from_dict({"input_ids": [ids, ids], "labels": labels}).with_format("torch")}
    found = [(prompt.tolist(), expected.tolist()) for prompt, expected in data.held_out(2)]
    assert found == [(ids[:16], ids[16:18]), (ids[:16], [])]
    # an answer of one token at the beginning of a text: the model has no token to predict it from
    template = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    lines = ['{"messages": [{"role": "assistant", "content": "a"}]}']
    samples = tokenize({"text": lines}, byte_tokenizer(template), 8, "answers", by_line=True)
    assert samples["labels"][0][0] != -100
    assert samples["scored"] == [0]


def test_files_are_paths_globs_or_the_interpreters_sources(text_folder):
    files = find_files(None)
    assert os.__file__ in map(str, files) and len(files) > 100
    assert not any({"site-packages", "test", "tests", "__pycache__"} & set(path.parts[-4:-1]) for path in files)
    one = text_folder / "00.txt"
    assert find_files(str(one)) == [one]
    assert len(find_files([f"{text_folder}/*.txt"])) == 6
    assert len(find_files([f"{text_folder}/**/*.txt", str(one)])) == 12
    (text_folder / "picture.txt").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(ConfigError, match=r"picture\.txt"):
        TextData(f"{text_folder}/*.txt").setup()


def test_nobody_else_enters_the_cache_of_texts(tmp_path):
    folder = cache_folder() / "datasets"
    folder.mkdir(mode=0o755, parents=True)
    (tmp_path / "a.txt").write_text("a secret")
    TextData(str(tmp_path / "a.txt"), seq_len=2, batch_size=1, vocab_size=257).setup()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(folder in path.parents for path in cache_folder().rglob("*.arrow"))


def numbered(batch_size, **options):
    samples = Dataset.from_dict({name: [[i, i + 100] for i in range(11)] for name in ("input_ids", "labels")})
    sampler = DistributedSampler([[i] for i in range(11)], **{"num_replicas": 1, "rank": 0, **options}, drop_last=True)
    return SampleLoader(samples.with_format("torch"), sampler, batch_size)


def rows(loader):
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


def test_an_epoch_has_whole_batches_and_processes_share_them():
    loader = numbered(3, seed=1)
    first = rows(loader)
    assert len(loader) == 3 and [len(batch) for batch in first] == [3, 3, 3] and len(set(chain(*first))) == 9
    assert rows(loader) == first == rows(numbered(3, seed=1))
    loader.sampler.set_epoch(1)
    assert rows(loader) != first
    shares = [set(chain(*rows(numbered(2, seed=3, rank=r, num_replicas=2)))) for r in range(2)]
    assert [len(share) for share in shares] == [4, 4] and not shares[0] & shares[1]


def test_a_loaded_epoch_goes_on_the_next_one_is_whole_and_another_order_is_refused_in_its_middle():
    loader, resumed = numbered(3, seed=1), numbered(3, seed=1)
    next(iter(loader))
    resumed.load_state_dict(loader.state_dict())
    assert rows(resumed) == rows(loader)[1:]
    resumed.load_state_dict(loader.state_dict())  # at the end of the epoch
    for each in (loader, resumed):
        each.sampler.set_epoch(1)
    assert resumed.state_dict()["next_batch"] == 0
    assert rows(resumed) == rows(loader) and len(rows(loader)) == 3
    loader, other = numbered(3, seed=1), numbered(3, seed=2)
    other.load_state_dict(loader.state_dict())
    next(iter(loader))
    with pytest.raises(CheckpointError, match="batch 1 of an epoch"):
        other.load_state_dict(loader.state_dict())


def test_a_row_has_its_samples_behind_each_other_and_padding_without_labels():
    samples = Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 4], [3, 2]], "labels": [[-100, 6, 7], [8, 4], [3, 2]]})
    sampler = DistributedSampler([[0, 2], [1]], 1, 0, shuffle=False)
    (batch,) = SampleLoader(samples.with_format("torch"), sampler, 2)
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[5, 6, 7, 3, 2], [8, 4, 0, 0, 0]],
        "labels": [[-100, 6, 7, -100, 2], [-100, 4, -100, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]],
    }
    assert {values.dtype for values in batch.values()} == {torch.int64}


TEXTS = ["def f(x):\n    return x + 1\n" * 20, "class A:\n    pass\n" * 20]


def test_training_learns_merges_and_keeps_the_vocabulary_bound():
    tokenizer, text = trained_tokenizer(TEXTS, 280, "key"), "  naïve 漢字 🙂\x00 "
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert len(tokenizer) == 280
    assert len(tokenizer("def f(x)")["input_ids"]) < len("def f(x)")
    assert tokenizer.eos_token == "<|endoftext|>"


def test_a_failed_save_leaves_nothing_behind(cache, monkeypatch):
    def save(self, path):
        Path(path).write_text("half")
        raise OSError(28, "no space left")

    monkeypatch.setattr("tokenizers.ByteLevelBPETokenizer.save", save)
    with pytest.raises(OSError, match="no space"):
        trained_tokenizer(TEXTS, 280, "key")
    assert list((cache / "tokenizers").iterdir()) == []
