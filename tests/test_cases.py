import itertools

import pytest

from tests import cases

COLUMNS = ("abc", [{}, {1: 2}], (1, 2, 3, 4))


def test_every_value_and_every_pair_occur():
    assert len(cases.every_value(*COLUMNS)) == 4
    chosen = cases.every_pair(*COLUMNS)
    assert 12 <= len(chosen) <= 16 < 24
    for (i, first), (j, second) in itertools.combinations(enumerate(COLUMNS), 2):
        for pair in itertools.product(first, second):
            assert any((case[i], case[j]) == pair for case in chosen), pair


def test_there_are_only_cases_that_there_are_and_some_are_full():
    chosen = cases.every_pair(*COLUMNS, where=lambda letter, options, _: letter != "a" or not options)
    assert not any(case[:2] == ("a", {1: 2}) for case in chosen)
    first, second, third = cases.others_full([1, 2, 3], stay=(1, 3))
    assert (first, third) == (1, 3) and second.values == (2,) and second.marks == (pytest.mark.full,)
