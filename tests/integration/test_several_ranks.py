"""Every launcher starts ranks that meet, share the data out and agree; one that fails ends all."""

import json
import time

import pytest

from tests.integration.several_ranks import NUM_ROWS, Started

pytestmark = [pytest.mark.on_cpu, pytest.mark.slow]
SECONDS = 60
"""In which all ranks end when one has failed."""
ENVIRONMENTS = {"machines": "LightningEnvironment", "torchrun": "TorchElasticEnvironment", "slurm": "SLURMEnvironment"}


def run(launcher, folder, *arguments):
    """Return exit codes, what was printed, and the seconds from the moment of the failure on."""
    failed = []

    def look():
        if not failed and "failing" in "".join(started.logs()):
            failed.append(time.monotonic())

    started = Started(launcher, folder, *arguments)
    codes = started.codes(240, look)
    return codes, started.logs(), time.monotonic() - failed[0] if failed else 0.0


@pytest.mark.parametrize("launcher", ENVIRONMENTS)  # Lightning's on one machine: tests/distributed
@pytest.mark.full
def test_ranks_meet_share_the_data_and_agree(tmp_path, launcher):
    codes, logs, _ = run(launcher, tmp_path)
    assert set(codes) == {0}, logs[0][-3000:]
    found = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    apart = launcher == "machines"
    for rank, each in enumerate(found):
        assert each["ranks"] == [rank, 0 if apart else rank, rank if apart else 0, 2]
        assert each["environment"] == ENVIRONMENTS[launcher]
        assert each["mesh"] == ({"replicate": 2, "shard": 1} if apart else {"shard": 2})
        assert each["from_1"] == 1 and each["gathered"] == [0, 1] and each["largest"] == 1
        assert not each["all_zero"] and each["any_zero"]
    assert sorted(found[0]["rows"] + found[1]["rows"]) == list(range(NUM_ROWS))
    own, means = [each["metrics"]["own"] for each in found], [each["metrics"]["mean"] for each in found]
    assert own[0] != own[1] and means[0] == means[1] == pytest.approx(sum(own) / 2)


@pytest.mark.parametrize(
    ("fails", "launcher"), [("raise, and save", "lightning"), ("raise", "torchrun"), ("setup", "machines")]
)
def test_a_rank_that_raises_ends_all_and_its_error_is_shown(tmp_path, fails, launcher):
    codes, logs, took = run(launcher, tmp_path, f"--fail={fails}")
    assert 0 not in codes and took < SECONDS
    error = "TierFullError: cannot place" if fails == "setup" else "ValueError: this batch is bad"
    assert error in logs[-1]
    if launcher == "torchrun":
        assert error in logs[0].partition("Root Cause (first observed failure)")[2]


@pytest.mark.full
def test_a_rank_that_hangs_is_found_after_the_timeout(tmp_path):
    """Torchrun kills it 30 s after the other one has failed."""
    codes, logs, took = run("torchrun", tmp_path, "--fail=hang", "--timeout=10")
    assert 0 not in codes and took < 10 + 30 + SECONDS
    assert "Timed out waiting" in logs[0], logs[0][-3000:]
