import json
import os
import random
import signal
import time
from contextlib import closing, suppress
from functools import partial

import pytest
import torch

from lightning_cxl.run.sharded_checkpoint import ShardedCheckpoint
from tests.distributed import killed_ranks
from tests.distributed.training import assert_same_weights
from tests.integration.several_ranks import Started

pytestmark = [pytest.mark.on_cpu, pytest.mark.slow, pytest.mark.timeout(900)]
LIMIT_S = 60
KILLS = 4  # of a run that is started again each time
STEPS = 3 * KILLS + 3


class Job(Started):
    """Processes of the program, started in a folder."""

    def __init__(self, folder, launcher, steps, max_restarts=0, how=""):
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        options = {"program": killed_ranks.__file__, "max_restarts": max_restarts}
        self.start = partial(super().__init__, launcher, folder, str(steps), how, **options)
        self.start()

    def losses(self):
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.folder / "losses.jsonl").read_text().splitlines()]
        return []

    def wait_for_steps(self, count):
        """Wait until both ranks run, and so many more steps have ended."""
        self._wait_until(lambda: len(list(self.folder.glob("*.pid"))) == 2)
        until = len(self.losses()) + count
        self._wait_until(lambda: len(self.losses()) >= until)

    def _wait_until(self, is_so):
        end = time.monotonic() + 240
        while not is_so():
            assert time.monotonic() < end and self._processes[0].poll() is None, self.logs()[0][-5000:]
            time.sleep(0.005)

    def kill(self, rank):
        number = int((self.folder / f"{rank}.pid").read_text())
        for path in self.folder.glob("*.pid"):
            path.unlink()  # each start writes its own
        os.kill(number, signal.SIGKILL)


def check_checkpoints(folder):
    """Read all of every checkpoint that has its name; return how many there are."""
    found = [path for path in (folder / "checkpoints").iterdir() if not path.name.startswith(".")]
    for checkpoint in map(ShardedCheckpoint, found):
        checkpoint.rest(weights_only=False)
        names = [f"{part}.{name}" for part in ("state_dict", "optimizer_0") for name in checkpoint.names(part)]
        for name in filter(checkpoint.is_tensor, names):
            checkpoint.tensor(name)
    return len(found)


def assert_as_if_nothing_was(job, whole):
    """Compare with the run that nobody has killed: every loss that was seen, and the weights."""
    expected = dict(map(tuple, whole.losses()))
    assert all(expected[step] == loss for step, loss in job.losses())
    assert_same_weights(*(torch.load(each.folder / "weights.pt") for each in (job, whole)))
    left = [path.name for path in (job.folder / "checkpoints").iterdir()]
    assert not [name for name in left if name.startswith(".")], left


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("whole"), "lightning", STEPS)
    assert job.codes(240) == [0], job.logs()[0][-5000:]
    return job


def waited(chance, moment, folder):
    """Wait for a moment within the next step."""
    if moment == "any":
        time.sleep(chance.random() * 0.3)
        return
    end = time.monotonic() + 5
    while time.monotonic() < end and not list((folder / "checkpoints").glob(".*.partial")):
        time.sleep(0.001)
    time.sleep(chance.random() * 0.03)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["", "asynchronous"])
@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_a_run_goes_on_from_the_last_checkpoint(tmp_path, whole, launcher, how):
    """Torchrun starts all ranks again; Lightning's end with an error, and the user starts them."""
    chance, goes_on = random.Random(1), False
    with closing(Job(tmp_path / "killed", launcher, STEPS, max_restarts=KILLS, how=how)) as job:
        for number in range(KILLS):
            job.wait_for_steps(1 + chance.randrange(3))
            waited(chance, ("any", "saving")[number % 2], job.folder)
            job.kill(chance.randrange(2))
            if launcher == "lightning":
                assert job.codes(LIMIT_S) != [0]
                whole_ones = check_checkpoints(job.folder)
                assert whole_ones or (how and not goes_on), "the first one may still have been behind the training"
                goes_on = goes_on or bool(whole_ones)
                job.start()
        assert job.codes(240) == [0], job.logs()[0][-5000:]
    # who is killed between the two saves of a step leaves that of the step, which nobody remembers
    assert 3 <= check_checkpoints(job.folder) <= 3 + KILLS
    assert_as_if_nothing_was(job, whole)
