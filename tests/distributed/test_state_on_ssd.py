"""Optimizer state and inputs of units of several processes on SSD: each has its own, and all is as in memory."""

import os

import pytest
import torch

from tests.cases import every_value
from tests.distributed import lightning_runs, ssd_runs
from tests.distributed.training import Job

RULE = {"*": {"optimizer_state": "ssd", "activations": "ssd"}}
MIB = 1 << 20


def on_ssd(folder, rule=RULE, **options):
    return {"tiers": {"ssd": {"path": str(folder), "budget": 64 * MIB, **options}}, "tier_rules": rule}


def assert_same(ours, theirs):
    assert ours.losses == theirs.losses and ours.norms == theirs.norms
    for name, weights in theirs.weights.items():
        assert torch.equal(ours.weights[name], weights), name


JOBS = {
    "float32": Job(micro_batches=2, clip=0.5),
    "uneven shards, split masters": Job(model="transformer", tied=False, scalars=True, bf16=True, clip=0.1),
    "8 bit": Job(options={"state": "8bit"}, sizes={"hidden_size": 64, "intermediate_size": 256}),
    "lora": Job(lora=True, clip=0.05),
}


@pytest.mark.parametrize(("name", "device"), every_value(JOBS, ["cpu", "apart"]))
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_training_is_that_of_state_in_memory(ranks, tmp_path, device, name):
    job = JOBS[name]
    there = Job(**{**vars(job), "options": {**job.options, **on_ssd(tmp_path / "ssd")}})
    ours, theirs = (ranks.of(2, device).run(ssd_runs.by_us, each) for each in (there, job))
    for mine, reference in zip(ours, theirs, strict=True):
        assert_same(mine, reference)
        roles = mine.report["peak_roles"]
        assert not {"momentum", "variance", "activations"} & roles.keys(), "they were in memory"
        tier = mine.report["tiers"]["ssd"]
        assert tier["budget_bytes"] == 32 * MIB and 0 < tier["peak_bytes"] <= 32 * MIB
    left = {name: os.listdir(tmp_path / "ssd" / name) for name in os.listdir(tmp_path / "ssd")}
    assert left == {"rank-0": ["lightning_cxl.lock"], "rank-1": ["lightning_cxl.lock"]}


def test_state_that_memory_cannot_hold_goes_there(ranks, tmp_path):
    job = Job(sizes={"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}, steps=2)
    options = {"tiers": {"ssd": {"path": str(tmp_path), "budget": "1GiB"}, "dram": "28MiB"}, "on_tier_full": "error"}
    for found, reference in zip(
        ranks.of(2).run(ssd_runs.by_us, Job(**{**vars(job), "options": options})),
        ranks.of(2).run(ssd_runs.by_us, job),
        strict=True,
    ):
        assert_same(found, reference)
        assert found.report["planned_roles"]["momentum"].keys() >= {"ssd"}
        assert found.report["tiers"]["dram"]["peak_bytes"] <= 14 * MIB


def run(ranks, world, *args, **keywords):
    if world == 1:
        return lightning_runs.fit(*args, **keywords)
    return ranks.of(world).run(lightning_runs.fit, *args, **keywords)[0]


STATES = {"bf16 with split masters": ({"precision": "bf16-true"}, {}), "8 bit": ({}, {"state": "8bit"})}


@pytest.mark.parametrize("before, after, state", [(1, 2, "8 bit"), (2, 1, "8 bit"), (2, 2, "bf16 with split masters")])
def test_checkpoints_go_on_in_any_number_of_processes(ranks, tmp_path, before, after, state):
    trainer, options = STATES[state]
    there, path = (
        {**options, **on_ssd(tmp_path / "ssd")},
        {each: str(tmp_path / each) for each in ("ssd.ckpt", "ram.ckpt")},
    )
    ours = run(ranks, before, 3, trainer=trainer, options=there, save=path["ssd.ckpt"])
    run(ranks, before, 3, trainer=trainer, options=options, save=path["ram.ckpt"])
    rest = run(ranks, after, 6, trainer=trainer, options=there, resume=path["ssd.ckpt"])
    reference = run(ranks, after, 6, trainer=trainer, options=options, resume=path["ram.ckpt"])
    assert len(ours["losses"]) == 3 and rest["losses"] == reference["losses"]
    for name, weights in reference["weights"].items():
        assert torch.equal(rest["weights"][name], weights), name


def test_what_one_drive_has_damaged_no_rank_saves(ranks, tmp_path):
    path = tmp_path / "it.ckpt"
    found = ranks.of(2).run(ssd_runs.save_what_is_damaged, tmp_path / "ssd", path, on_ssd(tmp_path / "ssd"))
    assert all(each.startswith("StorageError: rank 1 of the group: ") and "is damaged" in each for each in found), found
    assert not path.exists()


REFUSED = {
    "checkpoint='reference' of tier 'ssd' serves one process": {"checkpoint": "reference"},
    "a CPU gathers them from memory": {"rule": {"*": {"weights": "ssd"}}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_needs_one_process_is_refused(ranks, tmp_path, message):
    for found in ranks.of(2).run(ssd_runs.refusal, on_ssd(tmp_path / "ssd", **REFUSED[message])):
        assert found.startswith("UnsupportedError") and message in found, found
