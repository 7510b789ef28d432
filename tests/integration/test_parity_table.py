"""The table of parity, in a choice in which every two of its values meet; its program goes through all."""

import pytest

from tests.cases import every_pair
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


@pytest.fixture(scope="module", autouse=True)
def _references():
    yield
    reference.cache_clear()


@pytest.mark.parametrize(
    ("model", "schedule", "precision", "accumulate"),
    every_pair(MODELS, SCHEDULES, PRECISIONS, ACCUMULATE, where=promises),
)
def test_parity(model, schedule, precision, accumulate):
    if model == "lora":
        pytest.importorskip("peft")
    result = compare(model, schedule, precision, accumulate)
    assert is_right(result, model, schedule, precision, accumulate), f"losses differ by {result}"
