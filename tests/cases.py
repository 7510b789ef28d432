"""Which cases of a product run: few in which all values occur, or meet; and which of them are ``full``."""

import itertools

import pytest


def covering(cases, together):
    """Return few of the cases that have every combination of `together` values of theirs; greedy, always the same.

    Values are told apart by identity, so that they may be dicts.
    """

    def combinations(case):
        return set(itertools.combinations(((column, id(value)) for column, value in enumerate(case)), together))

    wanted = set().union(*map(combinations, cases))
    chosen = []
    while wanted:
        best = max(cases, key=lambda case: len(combinations(case) & wanted))
        wanted -= combinations(best)
        chosen.append(best)
    return chosen


def every_value(*columns):
    """Return few cases of a product, for ``parametrize``, in which every value of every column occurs."""
    return covering(list(itertools.product(*columns)), 1)


def every_pair(*columns, where=lambda *_: True):
    """Return few cases of a product, for ``parametrize``, in which every two values of two columns meet.

    `where` says which cases there are.
    """
    return covering([case for case in itertools.product(*columns) if where(*case)], 2)


def others_full(cases, stay):
    """Return cases of one argument, or tuples of several; those that are not in `stay` are ``full``."""
    stay = list(stay)
    values = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [case if case in stay else pytest.param(*value, marks=pytest.mark.full) for case, value in values]
