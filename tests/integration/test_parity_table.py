"""A choice of the table in which every two values of model, schedule, precision and accumulation meet."""

import itertools

import pytest

from tests.integration.parity_table import (
    ACCUMULATE,
    MODELS,
    PRECISIONS,
    SCHEDULES,
    compare,
    is_right,
    promises_nothing,
    reference,
)


def pairwise():
    """Yield few cases that have every pair of values of two columns; greedy."""
    columns = (list(MODELS), list(SCHEDULES), list(PRECISIONS), list(ACCUMULATE))

    def pairs(case):
        return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(4), 2)}

    cases = [case for case in itertools.product(*columns) if not promises_nothing(*case[:3])]
    wanted = set().union(*map(pairs, cases))
    while wanted:
        best = max(cases, key=lambda case: len(pairs(case) & wanted))
        wanted -= pairs(best)
        yield best


@pytest.fixture(scope="module", autouse=True)
def _references():
    yield
    reference.cache_clear()


@pytest.mark.parametrize(("model", "schedule", "precision", "accumulate"), sorted(pairwise()))
def test_parity(model, schedule, precision, accumulate):
    if model == "lora":
        pytest.importorskip("peft")
    result = compare(model, schedule, precision, accumulate)
    assert is_right(result, model, schedule, precision, accumulate), f"losses differ by {result}"
