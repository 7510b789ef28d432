"""A system call of storage goes wrong in a training run: the result is right or an error of ours; nothing is lost."""

import random

import pytest

from tests.faulty_system import FAULTS
from tests.integration.faulty_run import Runs, bad

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
]

NUM_CALLS = 4  # of each fault, chosen by chance; `python -m tests.integration.faulty_run` takes all


@pytest.mark.parametrize(("schedule", "resumed"), [("overlap", False), ("whole", True)], ids=["overlap", "resumed"])
def test_faults(tmp_path, schedule, resumed):
    runs = Runs(tmp_path, schedule, resumed=resumed)
    rng = random.Random(len(schedule))
    outcomes = [runs.one(fault, at) for fault in FAULTS for at in rng.sample(range(len(runs.calls)), NUM_CALLS)]
    assert not bad(outcomes)
    assert {"same", "refused"} == {each.run for each in outcomes}
    assert "same" in {each.resumed for each in outcomes}
