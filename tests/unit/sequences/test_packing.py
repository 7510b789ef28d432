import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.errors import ConfigError
from lightning_cxl.sequences.packing import fit_rows, lengths_of, pack_sequences, without_first


@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_sequence_is_in_one_row_that_has_room_and_no_two_rows_fit_into_one(lengths):
    rows = fit_rows(lengths, 20)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    full = sorted(sum(lengths[number] for number in row) for row in rows)
    assert all(0 < tokens <= 20 for tokens in full)
    assert len(full) < 2 or full[0] + full[1] > 20
    assert rows == fit_rows(lengths, 20)


def test_the_fullest_row_with_room_is_filled():
    assert fit_rows([5, 3, 6, 2, 4], 10) == [[2, 4], [0, 1, 3]]


@pytest.mark.parametrize("lengths", [[3, 0], [3, 11]])
def test_what_does_not_fit_a_row_is_refused(lengths):
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
