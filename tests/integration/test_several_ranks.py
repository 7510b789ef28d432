"""Every launcher starts ranks that meet, share the data out and agree; one that fails ends all, and all show why."""

import json
import os
import signal
import time

import pytest

from tests.cases import others_full
from tests.integration.several_ranks import LAUNCHERS, NUM_ROWS, start

pytestmark = [pytest.mark.on_cpu, pytest.mark.slow]
ENVIRONMENTS = {
    "lightning": "LightningEnvironment",
    "machines": "LightningEnvironment",
    "torchrun": "TorchElasticEnvironment",
    "slurm": "SLURMEnvironment",
}


def run(launcher, folder, *arguments, seconds=240):
    """Return exit codes, what was printed, and the seconds from the moment of the failure on."""
    processes, failed = start(launcher, folder, *arguments), None
    logs = [folder / f"{number}.log" for number in range(len(processes))]
    try:
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in processes):
            if failed is None and "failing" in "".join(log.read_text() for log in logs):
                failed = time.monotonic()
            assert time.monotonic() < end, "\n".join(log.read_text()[-2000:] for log in logs)
            time.sleep(0.05)
        took = 0.0 if failed is None else time.monotonic() - failed
        return [process.returncode for process in processes], [log.read_text() for log in logs], took
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("launcher", others_full(LAUNCHERS, ["lightning", "slurm"]))
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


@pytest.mark.parametrize("launcher", others_full(LAUNCHERS, ["lightning", "torchrun"]))
def test_a_rank_that_raises_is_shown_by_all(tmp_path, launcher):
    codes, logs, took = run(launcher, tmp_path, "--fail=raise")
    assert 0 not in codes and took < 120
    lines = [line.removeprefix("[rank0]: ").strip() for line in logs[0].splitlines() if line.strip("= ")]
    if launcher == "torchrun":
        assert lines[-1] == "ValueError: this batch is bad"  # the end of its summary
    else:
        assert "The first failure of this run was on rank 1 " in logs[0]
        ends = ["Rank 1 failed first: ValueError: this batch is bad"]
        if launcher == "lightning":  # both ranks print there
            ends.append("ValueError: this batch is bad")
        assert lines[-1] in ends or "terminated with code 1" in lines[-1]


@pytest.mark.parametrize(
    ("launcher", "rank"), others_full([("lightning", 1), ("machines", 0), ("torchrun", 1)], [("machines", 0)])
)
def test_a_rank_that_is_killed_is_named(tmp_path, launcher, rank):
    codes, logs, took = run(launcher, tmp_path, "--fail=kill", f"--rank={rank}", "--workers=1")
    assert 0 not in codes and took < 120
    shown = logs[-1 if launcher == "machines" else 0]
    if launcher == "torchrun":
        assert "Signal 9 (SIGKILL) received" in shown
    else:
        named = f"The first failure of this run was on rank {rank} " in shown and "it was killed" in shown
        # Lightning looks at its processes every 5 s, and kills rank 0, too: perhaps just before we say it
        assert named or (launcher == "lightning" and "terminated with code -9. Forcefully" in shown), shown[-3000:]


def test_a_rank_that_does_not_come_is_found_after_the_timeout(tmp_path):
    codes, logs, took = run("machines", tmp_path, "--fail=hang", "--timeout=10")
    assert codes == [1, 1] and took < 120
    assert "perhaps waited for: rank 1" in logs[0]
    assert "Rank 1 has not failed" in logs[1] and "in sleep_for_ever" in logs[1] and "Rank 1 ends itself" in logs[1]


@pytest.mark.full
def test_memory_that_is_full_on_one_rank_ends_all_before_they_train(tmp_path):
    codes, logs, _ = run("slurm", tmp_path, "--fail=setup")
    assert codes == [1, 1]
    assert "The first failure of this run was on rank 1 " in logs[0] and "TierFullError: cannot place" in logs[0]


@pytest.mark.full
def test_more_processes_than_devices_are_refused(tmp_path):
    codes, logs, _ = run("torchrun", tmp_path, "--devices=1", "--machines=3")
    assert codes == [1] and "does not match the world size (2)" in logs[0]
