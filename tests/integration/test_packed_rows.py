"""Packed rows under the strategy: recomputed units keep sequences apart as the forward did."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_cxl import packed_arguments
from lightning_cxl.sequences.packing import separate, without_first
from tests.cases import every_value
from tests.integration.llama import tiny_llama
from tests.integration.training import EXACT, assert_identical, offload, train
from tests.models import Task

POSITIONS = torch.tensor([*range(6), *range(9), *range(1), *range(4), *range(12)])
LATE = slice(15, None)
"""Tokens behind the first two sequences."""


def rows():
    tokens = torch.randint(0, 37, (16, len(POSITIONS)), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens, POSITIONS.expand_as(tokens)), batch_size=2)


class PackedTask(Task):
    """The loss of the later sequences alone."""

    def loss(self, batch):
        ids, positions = batch
        labels = without_first(ids, positions)
        labels[:, : LATE.start] = -100
        return self.given(ids, labels, positions)

    def given(self, ids, labels, positions):
        arguments = packed_arguments(self.model, positions)
        return self.model(input_ids=ids, labels=labels, use_cache=False, **arguments).loss


class OtherNeighbours(PackedTask):
    """The same, with other tokens in the first sequences."""

    def given(self, ids, labels, positions):
        changed = torch.cat([36 - ids[:, : LATE.start], ids[:, LATE]], 1)
        return super().given(changed, labels, positions)


class AloneTask(PackedTask):
    """The same, each sequence in a row of its own."""

    def given(self, ids, labels, positions):
        ids, labels = separate(ids, labels, positions)
        return self.model(input_ids=ids, labels=labels, use_cache=False).loss


@pytest.mark.parametrize(("streams", "attention"), every_value([True, False], ["sdpa", "eager"]))
def test_is_the_plain_run_and_knows_nothing_of_neighbours(streams, attention):
    def model():
        return tiny_llama(attn_implementation=attention)

    def ours(task):
        return train(model, offload(stream_weights=streams, **EXACT), data=rows, task=task, steps=6)

    found = ours(PackedTask)
    assert_identical(train(model, "auto", data=rows, task=PackedTask, steps=6), found)
    other = ours(OtherNeighbours)
    assert other[0] == found[0]  # losses, bit for bit
    head = "model.lm_head.weight"
    assert torch.equal(other[1][head], found[1][head])
    alone = ours(AloneTask)
    assert alone[0] == pytest.approx(found[0], rel=1e-5)
