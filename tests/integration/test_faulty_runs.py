"""A system call of storage goes wrong in a training run: the result is right or an error of ours; nothing is lost."""

import random
import re

import pytest

from tests.faulty_system import FAULTS
from tests.integration.faulty_run import Runs, bad

pytestmark = pytest.mark.slow

NUM_CALLS = 4  # of each fault, chosen by chance; `python -m tests.integration.faulty_run` takes all


@pytest.mark.parametrize(("schedule", "resumed"), [("overlap", False), ("whole", True)], ids=["overlap", "resumed"])
def test_faults(tmp_path, schedule, resumed):
    runs = Runs(tmp_path, schedule, resumed=resumed)
    rng = random.Random(len(schedule))
    outcomes = [runs.one(fault, at) for fault in FAULTS for at in rng.sample(range(len(runs.calls)), NUM_CALLS)]
    assert not bad(outcomes)
    assert {"same", "refused"} == {each.run for each in outcomes}
    assert "same" in {each.resumed for each in outcomes}


def test_of_a_drive_that_fails_for_good_the_first_error_is_told(tmp_path):
    """Files cannot be removed then, either, whether the run has begun or not.

    Reads and writes have threads of their own, so which of them meets the drive first is chance.
    """
    runs = Runs(tmp_path, "overlap")
    first_read = runs.calls.index("preadv")
    first_write = runs.calls.index("pwritev", first_read)
    for at, what in ((first_read, "cannot read "), (first_write, "cannot (read|write) ")):
        outcome = runs.one("EIO for good", at)
        assert (outcome.run, outcome.left) == ("refused", "")
        assert re.search(what, outcome.error) and "at offset" in outcome.error
