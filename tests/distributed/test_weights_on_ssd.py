"""Weights of several processes on SSD, each its shards: all is that of shards in memory, bit for bit."""

import os

import pytest
import torch

from tests.distributed import ssd_runs
from tests.distributed import ssd_weight_runs as runs
from tests.distributed.test_state_on_ssd import MIB, assert_same, on_ssd
from tests.distributed.training import Job
from tests.training_device import LATE

WEIGHTS = {"*": {"weights": "ssd"}}
ALL = {"*": {"weights": "ssd", "optimizer_state": "ssd", "activations": "ssd"}}
WIDE = {"hidden_size": 64, "intermediate_size": 256}
JOBS = {
    "weights alone": (WEIGHTS, Job(micro_batches=2, clip=0.5)),
    "all": (ALL, Job(micro_batches=2, clip=0.5)),
    "uneven shards, split masters": (ALL, Job(model="transformer", tied=False, scalars=True, bf16=True, clip=0.1)),
    "float32 masters": (WEIGHTS, Job(bf16=True, options={"master": "fp32"})),
    "8 bit": (ALL, Job(options={"state": "8bit"}, sizes=WIDE)),
    "frozen": (WEIGHTS, Job(lora=True, clip=0.05)),
    "reduced once": (WEIGHTS, Job(micro_batches=3, no_sync=True)),
}


def there(job, folder, rule=ALL):
    """Return a job with its weights on SSD."""
    return Job(**{**vars(job), "options": {**job.options, **on_ssd(folder / "ssd", rule)}})


def of_two(ranks, *args):
    return ranks.of(2, "apart").run(*args)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_training_is_that_of_weights_in_memory(ranks, tmp_path, name):
    rule, job = JOBS[name]
    ours, theirs = (of_two(ranks, ssd_runs.by_us, each) for each in (there(job, tmp_path, rule), job))
    for mine, reference in zip(ours, theirs, strict=True):
        assert_same(mine, reference)
        planned = dict(mine.report["planned_roles"]["compute_weights"])
        assert planned.pop("ssd") > 0
        assert planned == mine.report["peak_roles"]["compute_weights"], "more of the weights was in memory"
    left = {name: os.listdir(tmp_path / "ssd" / name) for name in os.listdir(tmp_path / "ssd")}
    assert left == {"rank-0": ["lightning_cxl.lock"], "rank-1": ["lightning_cxl.lock"]}


@pytest.mark.parametrize("delays", ["copies and kernels", "to the device, much", "to the host, much"])
def test_nothing_overtakes_a_late_copy_or_kernel(ranks, tmp_path, delays):
    job = Job(sizes={"num_hidden_layers": 4})
    ours = of_two(ranks, runs.late, there(job, tmp_path), LATE[delays])
    for mine, reference in zip(ours, of_two(ranks, ssd_runs.by_us, job), strict=True):
        assert_same(mine, reference)


def test_the_device_computes_while_weights_come(ranks, tmp_path):
    job = there(Job(sizes={"num_hidden_layers": 6}), tmp_path, WEIGHTS)
    assert min(of_two(ranks, runs.hidden_copies, job, {"kernel": 4e-3, "h2d": 16e-3})) > 0.3


@pytest.mark.parametrize("saved, resumed", [(True, True), (True, False), (False, True)])
def test_a_run_resumes_exactly(ranks, tmp_path, saved, resumed):
    job = Job(bf16=True, micro_batches=2)
    on_drives = there(job, tmp_path)
    before, after = (on_drives if each else job for each in (saved, resumed))
    ours = of_two(ranks, runs.save_and_resume, before, after, tmp_path / "ours.ckpt")
    theirs = of_two(ranks, runs.save_and_resume, job, job, tmp_path / "theirs.ckpt")
    for (losses, weights), (wanted, wanted_weights) in zip(ours, theirs, strict=True):
        assert losses == wanted
        assert all(torch.equal(weights[name], wanted_weights[name]) for name in wanted_weights)


def test_who_looks_and_writes_between_steps_sees_the_weights_of_now(ranks, tmp_path):
    job = Job(sizes={"num_hidden_layers": 3})
    ours, theirs = (of_two(ranks, runs.evaluated_and_written, each) for each in (there(job, tmp_path), job))
    for mine, reference in zip(ours, theirs, strict=True):
        for kind in ("whole", "after"):
            weights = mine.pop(kind)
            for name, wanted in reference.pop(kind).items():
                assert torch.equal(weights[name], wanted), name
        assert mine == reference


def test_weights_are_read_for_forward_backward_and_update_and_written_once(ranks, tmp_path):
    job = there(Job(sizes={**WIDE, "num_hidden_layers": 6}), tmp_path, WEIGHTS)
    for found in of_two(ranks, runs.moved, job):
        assert found["written_bytes_per_step"] == pytest.approx(found["nbytes"], rel=0.2)
        assert found["read_bytes_per_step"] == pytest.approx(3 * found["nbytes"], rel=0.2)


@pytest.mark.full
def test_weights_that_memory_cannot_hold_go_there(ranks, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 32}
    job = Job(sizes=sizes, steps=1)
    options = {"tiers": {"ssd": {"path": str(tmp_path), "budget": "1GiB"}, "dram": "60MiB"}, "on_tier_full": "error"}
    ours = of_two(ranks, ssd_runs.by_us, Job(**{**vars(job), "options": options}))
    for mine, reference in zip(ours, of_two(ranks, ssd_runs.by_us, job), strict=True):
        assert_same(mine, reference)
        assert "ssd" in mine.report["planned_roles"]["compute_weights"]
        assert mine.report["tiers"]["dram"]["peak_bytes"] <= 30 * MIB


def test_damaged_weights_are_not_saved(ranks, tmp_path):
    path, job = tmp_path / "it.ckpt", there(Job(), tmp_path, WEIGHTS)
    for found in of_two(ranks, runs.save_what_is_damaged, job, tmp_path / "ssd", path):
        assert found.startswith("StorageError: rank 1 of the group: ") and "is damaged" in found, found
    assert not path.exists()
