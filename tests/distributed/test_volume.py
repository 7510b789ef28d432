"""A step with us moves the bytes that `exchanges` says, to the byte, and the numbers that ranks agree on."""

import pytest

from lightning_cxl.planning.job import COLLECTIVES
from tests.distributed import volume
from tests.distributed.training import Job
from tests.distributed.volume import NORM, SKIP

# peft asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

JOBS = {
    "accumulated and clipped": Job(steps=2, micro_batches=3, clip=0.5),
    "bf16, not tied": Job(steps=2, tied=False, bf16=True, clip=0.5),
    "uneven shards": Job(steps=2, sizes={"vocab_size": 61, "intermediate_size": 45}),
    "frozen weights": Job(steps=2, frozen=("mlp", "embed")),
    "lora": Job(steps=2, lora=True, micro_batches=2),
    "two replicas, accumulated and clipped": Job(steps=2, micro_batches=2, clip=0.5, replicas=2),
}


def _check(ranks, world, job, **options):
    for steps, expected in ranks.of(world).run(volume.traffic, job, **options):
        forward, backward, scatter, all_reduce = (expected.get(name, 0.0) for name in COLLECTIVES)
        for moved in steps:
            assert moved.all_gather == forward + backward
            assert moved.reduce_scatter == scatter > 0
            assert moved.all_reduce == all_reduce
            assert moved.others == ({SKIP: 1, NORM: 1} if job.clip is not None else {SKIP: 1})
        assert (all_reduce > 0) == (job.replicas > 1)
        assert forward > 0


@pytest.mark.parametrize(
    ("world", "name"), [(4 if JOBS[name].replicas > 1 or "uneven" in name else 2, name) for name in JOBS]
)
def test_a_step_moves_what_the_formula_says(ranks, world, name):
    _check(ranks, world, JOBS[name])


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.full
def test_without_reductions_between_micro_batches(ranks, replicas):
    _check(ranks, 4, Job(steps=2, micro_batches=3, clip=0.5, replicas=replicas), no_sync=True)
