"""The table of parity, in a choice in which every two of its values meet; its program goes through all."""

import pytest

from tests.cases import every_pair
from tests.integration import parity_table as table

pytestmark = pytest.mark.every_case


def promises(model, schedule, precision, accumulate):
    return not table.promises_nothing(model, schedule, precision)


@pytest.fixture(scope="module", autouse=True)
def _references():
    yield
    table.reference.cache_clear()


@pytest.mark.parametrize(
    ("model", "schedule", "precision", "accumulate"),
    every_pair(table.MODELS, table.SCHEDULES, table.PRECISIONS, table.ACCUMULATE, where=promises),
)
def test_parity(model, schedule, precision, accumulate):
    if model == "lora":
        pytest.importorskip("peft")
    result = table.compare(model, schedule, precision, accumulate)
    assert table.is_right(result, model, schedule, precision, accumulate), f"losses differ by {result}"
