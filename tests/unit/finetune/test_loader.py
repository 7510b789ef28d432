from itertools import chain

import pytest
import torch
from datasets import Dataset

from lightning_cxl.errors import CheckpointError
from lightning_cxl.finetune.data import SampleLoader


@pytest.fixture
def blocks():
    return Dataset.from_dict({"input_ids": [[i, i + 100] for i in range(11)]}).with_format("torch")


def rows(loader):
    return [batch["input_ids"][:, 0].tolist() for batch in loader]


def test_batches_cover_whole_batches_of_the_blocks_once(blocks):
    loader = SampleLoader(blocks, 3, seed=1)
    batches = rows(loader)
    assert [len(batch) for batch in batches] == [3, 3, 3]
    assert len(loader) == 3
    assert len(set(chain(*batches))) == 9


def test_order_depends_on_seed_and_epoch_and_a_second_pass_repeats_it(blocks):
    loader = SampleLoader(blocks, 3, seed=1)
    first = rows(loader)
    assert rows(loader) == first == rows(SampleLoader(blocks, 3, seed=1))
    assert rows(SampleLoader(blocks, 3, seed=2)) != first
    loader.set_epoch(1)
    assert rows(loader) != first
    loader.set_epoch(0)
    assert rows(loader) == first


def test_without_seed_blocks_keep_their_order(blocks):
    assert rows(SampleLoader(blocks, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_processes_share_an_epoch_without_overlap(blocks):
    shares = [list(chain(*rows(SampleLoader(blocks, 2, seed=3, rank=r, world_size=2)))) for r in range(2)]
    assert [len(share) for share in shares] == [4, 4]
    assert not set(shares[0]) & set(shares[1])


@pytest.mark.parametrize("consumed", [0, 1, 2, 3])
def test_a_new_loader_continues_where_the_state_was_taken(blocks, consumed):
    loader = SampleLoader(blocks, 3, seed=1)
    loader.set_epoch(4)
    iterator = iter(loader)
    for _ in range(consumed):
        next(iterator)
    state = loader.state_dict()
    expected = [batch["input_ids"][:, 0].tolist() for batch in iterator]

    other = SampleLoader(blocks, 3, seed=1)
    other.load_state_dict(state)
    resumed = iter(other)
    other.set_epoch(4)  # Lightning's order: iter() comes before set_epoch()
    assert [batch["input_ids"][:, 0].tolist() for batch in resumed] == expected
    other.set_epoch(5)
    assert len(rows(other)) == 3


def test_state_of_another_order_is_refused_in_the_middle_of_an_epoch_only(blocks):
    loader = SampleLoader(blocks, 3, seed=1)
    state = loader.state_dict()
    other = SampleLoader(blocks, 3, seed=2)
    other.load_state_dict(state)
    next(iter(loader))
    with pytest.raises(CheckpointError, match="batch 1 of an epoch"):
        other.load_state_dict(loader.state_dict())


def test_shorter_samples_are_padded_behind_and_have_no_labels_there():
    samples = Dataset.from_dict({"input_ids": [[5, 6, 7], [8]], "labels": [[-100, 6, 7], [8]]}).with_format("torch")
    (batch,) = SampleLoader(samples, 2, pad_id=9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert batch["labels"].dtype == torch.int64
