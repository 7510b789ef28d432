"""Ranks that share their weights train bit for bit as those that gather them."""

from dataclasses import replace

import pytest

from tests.distributed import lightning_runs, shared_runs, training
from tests.distributed.training import Job
from tests.distributed.writes import written_by_users

# peft asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

JOBS = {
    "accumulated and clipped": Job(micro_batches=3, clip=0.5),
    "uneven shards, unused weights": Job(model="transformer", tied=False, clip=0.1),
    "lora": Job(lora=True, micro_batches=2, clip=0.05),
    "bf16": Job(model="transformer", bf16=True),
    "updates in the backward": Job(options={"overlap_step": True}),
    "torch's own AdamW": Job(options={"cpu_adam": False}, clip=0.5),
}
ON_A_DEVICE = {**JOBS, "float32 masters": Job(model="transformer", bf16=True, options={"master": "fp32"})}


def both(ranks, world, job, device="cpu"):
    """Return what comes out on each rank, with gathers and with shared weights."""
    found = []
    for shares in (False, True):
        options = {**job.options, "share_weights": shares}
        found.append(ranks.of(world, device).run(training.by_us, replace(job, options=options)))
    return found


def assert_same_bits(ranks, world, job, device="cpu"):
    for gathered, shared in zip(*both(ranks, world, job, device), strict=True):
        assert (gathered.losses, gathered.norms) == (shared.losses, shared.norms)
        assert gathered.weights.keys() == shared.weights.keys()
        assert all(gathered.weights[name].equal(shared.weights[name]) for name in shared.weights)
        assert "weights lie in shared host memory, as share_weights=True asks for" in shared.report["notes"]


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("world", [2, 4])
def test_the_same_bits(ranks, world, name):
    assert_same_bits(ranks, world, JOBS[name])


def test_replicated_shards(ranks):
    assert_same_bits(ranks, 4, Job(replicas=2, micro_batches=2, clip=0.5))


@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_on_a_device_apart(ranks, name):
    assert_same_bits(ranks, 2, ON_A_DEVICE[name], "apart")


@pytest.mark.parametrize("device", ["cpu", "apart"])
@pytest.mark.parametrize("late", [0, 1])
def test_what_users_write_on_late_ranks(ranks, device, late):
    gathered, shared = (
        ranks.of(2, device).run(written_by_users, Job(steps=3, options={"share_weights": shares}), late)
        for shares in (False, True)
    )
    assert gathered == shared
    assert len(set(gathered[0])) == len(gathered[0])


def test_a_run_of_lightning_that_is_saved_and_resumed(ranks, tmp_path):
    def fit(steps, shares, **keywords):
        keywords |= {"options": {"share_weights": shares}, "trainer": {"precision": "bf16-true"}}
        return ranks.of(2).run(lightning_runs.fit, steps, **keywords)[0]

    path = str(tmp_path / "half.ckpt")
    gathered = fit(6, False)
    first = fit(3, True, save=path)
    rest = fit(6, True, resume=path)
    assert [*first["losses"], *rest["losses"]] == gathered["losses"]
    assert all(rest["weights"][name].equal(weights) for name, weights in gathered["weights"].items())


def test_auto_says_what_was_measured(ranks):
    found = ranks.of(2).run(training.by_us, Job(steps=1, options={"share_weights": "auto"}))
    notes = [[note for note in each.report["notes"] if note.startswith("weights come together by ")] for each in found]
    assert notes[0] == notes[1] and len(notes[0]) == 1
    assert "GB/s" in notes[0][0]


def test_outputs_come_from_the_pool_and_fsdp2_has_its_own_collectives_after(ranks):
    for each in ranks.of(2).run(shared_runs.collectives):
        assert each["inside"] == {("SharedGather", "PooledCollective")}
        assert each["asked"][0] == each["asked"][-1] > 0
        assert each["after"] and each["same"]
        assert each["mapped"] == 1  # where this rank's shards are


@pytest.mark.parametrize("device", ["cpu", "apart"])
def test_an_error_after_sharing_leaves_nothing_of_it(ranks, device):
    first, second = ranks.of(2, device).run(shared_runs.failing)
    assert first["raised"] == second["raised"] == "TierFullError: no room for the rest"
    assert first["by_default"] and second["by_default"]
    assert (first["mapped"], second["mapped"]) == (1, 1)  # where this rank's shards are


@pytest.mark.parametrize("device", ["cpu", "apart"])
def test_shards_lie_in_several_segments_where_one_would_be_too_large(ranks, device):
    (one, *_), (several, *_) = (ranks.of(2, device).run(shared_runs.in_segments_of, n) for n in (2**30, 2**14))
    assert one["losses"] == several["losses"]
    assert one["mapped"] == 2 and several["mapped"] > 4


@pytest.mark.parametrize("device", ["cpu", "apart"])
def test_where_one_rank_has_no_room_the_weights_of_all_stay_unshared(ranks, device):
    for each in ranks.of(2, device).run(shared_runs.without_room):
        assert each["notes"][-1].startswith(
            "weights are gathered between ranks: rank 1 of the group: no room on the last"
        )
        assert each["mapped"] == 0


def test_forked_children_change_nothing(ranks):
    alone, forked = (ranks.of(2).run(shared_runs.with_children, forks) for forks in (False, True))
    assert [losses for losses, _ in alone] == [losses for losses, _ in forked]
    for _, said in forked:
        assert len(said) == 8
        assert all(each.startswith("0 segments; UnsupportedError: a forked child cannot gather") for each in said)
