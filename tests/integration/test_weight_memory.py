"""Memory while weights are loaded and saved, of a model of 400 MiB, each in a process of its own."""

import pytest

from tests.integration import weight_memory
from tests.processes import in_a_process

pytestmark = [pytest.mark.on_cpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    in_a_process(weight_memory.answer, "make", folder)
    return folder


@pytest.mark.parametrize("task", ["load", "load bf16 in a run"])
def test_loading_adds_the_model_and_at_most_20_mib(folder, task):
    """A piece for conversion is 16 MiB; in a run, tiers hold whole slabs."""
    used = in_a_process(weight_memory.answer, task, folder)
    assert used["model_mib"] == pytest.approx(200 if "bf16" in task else 400, rel=0.01)
    assert used["model_mib"] - 2 < used["peak_mib"] < used["model_mib"] + 20
    assert used["end_mib"] < used["model_mib"] + 20


@pytest.mark.parametrize("task", ["save bf16", "checkpoint of views", "resume"])
@pytest.mark.full
def test_saving_and_checkpoints_add_at_most_20_mib(folder, task):
    """Also with optimizer state, twice the model, and with parameters that are views of one piece of memory."""
    used = in_a_process(weight_memory.answer, task, folder)
    assert used["model_mib"] == pytest.approx(400, rel=0.01)
    assert used["peak_mib"] < 20 and used["end_mib"] < 5
