"""The table of parity; `make test` takes a choice in which every two of its values meet."""

import itertools

import pytest

from tests.cases import every_pair, others_full
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

pytestmark = pytest.mark.every_case


def promises(model, schedule, precision, accumulate):
    return not promises_nothing(model, schedule, precision)


COLUMNS = MODELS, SCHEDULES, PRECISIONS, ACCUMULATE
CASES = [case for case in itertools.product(*COLUMNS) if promises(*case)]


@pytest.fixture(scope="module", autouse=True)
def _references():
    yield
    reference.cache_clear()


@pytest.mark.parametrize(
    ("model", "schedule", "precision", "accumulate"), others_full(CASES, every_pair(*COLUMNS, where=promises))
)
def test_parity(model, schedule, precision, accumulate):
    if model == "lora":
        pytest.importorskip("peft")
    result = compare(model, schedule, precision, accumulate)
    assert is_right(result, model, schedule, precision, accumulate), f"losses differ by {result}"
