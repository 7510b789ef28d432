"""The choice of cases: nothing is lost, and what must occur does."""

import itertools

import pytest

from tests import cases

COLUMNS = ("abc", [{}, {1: 2}], (1, 2, 3, 4))


def values(params, *, full):
    return [param.values for param in params if bool(param.marks) == full]


@pytest.mark.parametrize("choose", [cases.every_value, cases.every_pair])
def test_all_cases_of_the_product_are_there_once(choose):
    params = choose(*COLUMNS)
    assert [param.values for param in params] == list(itertools.product(*COLUMNS))
    assert {mark.name for param in params for mark in param.marks} == {"full"}


def test_every_value_stays():
    stay = values(cases.every_value(*COLUMNS), full=False)
    assert len(stay) == 4
    assert all(any(case[i] == value for case in stay) for i, column in enumerate(COLUMNS) for value in column)


def test_every_pair_stays():
    stay = values(cases.every_pair(*COLUMNS), full=False)
    assert 12 <= len(stay) <= 16 < 24
    for (i, first), (j, second) in itertools.combinations(enumerate(COLUMNS), 2):
        for pair in itertools.product(first, second):
            assert any((case[i], case[j]) == pair for case in stay), pair


def test_only_cases_that_there_are():
    params = cases.every_pair(*COLUMNS, where=lambda letter, options, _: letter != "a" or not options)
    assert len(params) == 20 and not any(param.values[:2] == ("a", {1: 2}) for param in params)


def test_what_stays_of_one_argument_can_be_named():
    first, second, third = cases.others_full([1, 2, 3], stay=(1, 3))
    assert (first, third) == (1, 3) and second.values == (2,) and second.marks == (pytest.mark.full,)
