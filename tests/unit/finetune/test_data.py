from itertools import chain

import pytest
import torch
from datasets import Dataset

from lightning_cxl.errors import CheckpointError, ConfigError
from lightning_cxl.finetune import data as module
from lightning_cxl.finetune.data import BlockLoader, TextData, pack
from lightning_cxl.finetune.tokenizer import train_tokenizer


@pytest.fixture
def blocks():
    return Dataset.from_dict({"input_ids": [[i, i + 100] for i in range(11)]}).with_format("torch")


def rows(loader):
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


def test_batches_cover_whole_batches_of_the_blocks_once(blocks):
    loader = BlockLoader(blocks, 3, seed=1)
    batches = rows(loader)
    assert [len(batch) for batch in batches] == [3, 3, 3]
    assert len(loader) == 3
    assert len(set(chain(*batches))) == 9


def test_order_depends_on_seed_and_epoch_and_a_second_pass_repeats_it(blocks):
    loader = BlockLoader(blocks, 3, seed=1)
    first = rows(loader)
    assert rows(loader) == first == rows(BlockLoader(blocks, 3, seed=1))
    assert rows(BlockLoader(blocks, 3, seed=2)) != first
    loader.set_epoch(1)
    assert rows(loader) != first
    loader.set_epoch(0)
    assert rows(loader) == first


def test_without_seed_blocks_keep_their_order(blocks):
    assert rows(BlockLoader(blocks, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_processes_share_an_epoch_without_overlap(blocks):
    shares = [list(chain(*rows(BlockLoader(blocks, 2, seed=3, rank=r, world_size=2)))) for r in range(2)]
    assert [len(share) for share in shares] == [4, 4]
    assert not set(shares[0]) & set(shares[1])


@pytest.mark.parametrize("consumed", [0, 1, 2, 3])
def test_a_new_loader_continues_where_the_state_was_taken(blocks, consumed):
    loader = BlockLoader(blocks, 3, seed=1)
    loader.set_epoch(4)
    iterator = iter(loader)
    for _ in range(consumed):
        next(iterator)
    state = loader.state_dict()
    expected = [batch["input_ids"][:, 0].tolist() for batch in iterator]

    other = BlockLoader(blocks, 3, seed=1)
    other.load_state_dict(state)
    resumed = iter(other)
    other.set_epoch(4)  # Lightning's order: iter() comes before set_epoch()
    assert [batch["input_ids"][:, 0].tolist() for batch in resumed] == expected
    other.set_epoch(5)
    assert len(rows(other)) == 3


def test_state_of_another_order_is_refused_in_the_middle_of_an_epoch_only(blocks):
    loader = BlockLoader(blocks, 3, seed=1)
    state = loader.state_dict()
    other = BlockLoader(blocks, 3, seed=2)
    other.load_state_dict(state)
    next(iter(loader))
    with pytest.raises(CheckpointError, match="batch 1 of an epoch"):
        other.load_state_dict(loader.state_dict())


def test_packing_keeps_every_token_between_end_of_text_tokens():
    texts = [f"text number {i}" for i in range(9)]
    tokenizer = train_tokenizer(texts, 270)
    packed = pack(Dataset.from_dict({"text": texts}), tokenizer, 8)
    assert packed[0]["input_ids"].dtype == torch.int64
    assert {len(row) for row in packed["input_ids"][:]} == {8}
    decoded = tokenizer.decode(torch.cat(list(packed["input_ids"][:]))).split("<|endoftext|>")
    assert set(decoded[:-1]) <= set(texts)
    assert len(decoded) >= 8  # all but what filled no block


def test_split_is_disjoint_stable_and_as_large_as_asked(data, text_folder):
    data.setup()
    train, val = data._train["input_ids"][:], data._val["input_ids"][:]
    assert len(val) == round(0.2 * (len(train) + len(val)))
    again = TextData(f"{text_folder}/**/*.txt", seq_len=16, batch_size=2, vocab_size=300, val_fraction=0.2, seed=9)
    again.setup()
    assert torch.equal(torch.stack(list(again._val["input_ids"][:])), torch.stack(list(val)))


def test_prepared_data_is_opened_from_the_cache_until_something_changes(data, text_folder, cache):
    def files():
        return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.suffix in (".arrow", ".json")}

    data.prepare_data()
    prepared = files()
    data.setup()
    assert len(data.train_dataloader()) > 1
    assert files() == prepared

    TextData(f"{text_folder}/**/*.txt", seq_len=8, batch_size=2, vocab_size=300).setup()
    longer = files()
    assert len(longer) == len(prepared) + 1  # packed again, from the same text and tokenizer
    (text_folder / "00.txt").write_text("changed text " * 50)
    TextData(f"{text_folder}/**/*.txt", seq_len=8, batch_size=2, vocab_size=300).setup()
    assert any("tokenizer" in path.name for path in files().keys() - longer.keys())


def test_the_default_text_is_the_standard_library(monkeypatch, text_folder):
    few = sorted(text_folder.glob("*.txt"))
    monkeypatch.setattr(module, "stdlib_files", lambda: few)
    data = TextData(seq_len=16, batch_size=2, vocab_size=300)
    data.setup()
    assert len(data.train_dataloader()) > 1


def test_a_given_tokenizer_is_used_instead_of_training_one(text_folder, tmp_path):
    own = train_tokenizer(["completely different words"], 262)
    own.save_pretrained(tmp_path / "own")
    data = TextData(f"{text_folder}/**/*.txt", seq_len=16, batch_size=2, tokenizer_name_or_path=str(tmp_path / "own"))
    data.setup()
    assert data.tokenizer.get_vocab() == own.get_vocab()


def test_too_little_text_is_an_error_with_the_numbers(text_folder):
    data = TextData(f"{text_folder}/00.txt", seq_len=4096, batch_size=2, vocab_size=300)
    with pytest.raises(ConfigError, match="0 blocks of 4096 tokens"):
        data.setup()


@pytest.mark.parametrize("option", [{"seq_len": 1}, {"batch_size": 0}, {"val_fraction": 0.0}, {"val_fraction": 1.0}])
def test_impossible_numbers_are_refused(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        TextData(**option)
