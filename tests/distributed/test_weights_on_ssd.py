"""Weights of several processes on SSD, each its shards: training is that of shards in memory, bit for bit."""

import os

import pytest
import torch

from tests.distributed import ssd_runs
from tests.distributed.test_state_on_ssd import MIB, assert_same, on_ssd
from tests.distributed.training import Job

WEIGHTS = {"*": {"weights": "ssd"}}
ALL = {"*": {"weights": "ssd", "optimizer_state": "ssd", "activations": "ssd"}}
WIDE = {"hidden_size": 64, "intermediate_size": 256}
JOBS = {
    "weights alone": (WEIGHTS, Job(micro_batches=2, clip=0.5)),
    "all": (ALL, Job(micro_batches=2, clip=0.5)),
    "uneven shards, split masters": (ALL, Job(model="transformer", tied=False, bf16=True, clip=0.1)),
    "float32 masters": (WEIGHTS, Job(bf16=True, options={"master": "fp32"})),
    "8 bit": (ALL, Job(options={"state": "8bit"}, sizes=WIDE)),
    "frozen": (WEIGHTS, Job(lora=True, clip=0.05)),
    "reduced once": (WEIGHTS, Job(micro_batches=3, no_sync=True)),
    "another optimizer": (WEIGHTS, Job(optimizer="SGD")),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_training_is_that_of_weights_in_memory(ranks, tmp_path, name):
    rule, job = JOBS[name]
    there = Job(**{**vars(job), "options": {**job.options, **on_ssd(tmp_path / "ssd", rule)}})
    ours, theirs = (ranks.of(2, "apart").run(ssd_runs.by_us, each) for each in (there, job))
    for mine, reference in zip(ours, theirs, strict=True):
        assert_same(mine, reference)
        planned = mine.report["planned_roles"]["compute_weights"]
        assert planned.get("ssd", 0) > 0
