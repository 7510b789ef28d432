"""Several processes with us train as FSDP2 alone does, and as one process does."""

import pytest

from tests.distributed import training
from tests.distributed.training import Job, largest_difference

LIMIT = 1e-6
# peft asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

JOBS = {
    "plain": Job(),
    "accumulated and clipped": Job(micro_batches=3, clip=0.5),
    "reduced by the last micro-batch alone": Job(micro_batches=3, clip=0.5, no_sync=True),
    "not tied": Job(tied=False, clip=0.5),
    "uneven shards, unused weights": Job(model="transformer", tied=False, clip=0.1),
    "frozen weights": Job(frozen=("mlp", "embed"), clip=0.5),
    "lora": Job(lora=True, micro_batches=2, clip=0.05),
    "another optimizer": Job(optimizer="SGD", micro_batches=2, clip=0.5),
    "torch's own AdamW": Job(options={"cpu_adam": False}, clip=0.5),
}


@pytest.mark.parametrize(("name", "world"), [*((name, 2) for name in JOBS), ("uneven shards, unused weights", 4)])
def test_as_fsdp_alone_and_as_one_process(ranks, world, name):
    job = JOBS[name]
    ours = ranks.of(world).run(training.by_us, job)
    alone = ranks.of(world).run(training.by_fsdp, job)
    for mine, theirs in zip(ours, alone, strict=True):
        losses, weights = largest_difference(mine, theirs)
        assert losses <= LIMIT and weights <= LIMIT, (losses, weights)
        assert mine.norms == pytest.approx(theirs.norms, rel=1e-6)
    losses, weights = largest_difference(ours[0], training.by_one(job))
    assert losses <= LIMIT and weights <= 5 * LIMIT, (losses, weights)


def test_bf16_with_split_masters_equals_fsdp_with_float32_shards(ranks):
    job = Job(model="transformer", bf16=True, steps=2)
    ours = ranks.of(2).run(training.by_us, job)
    alone = ranks.of(2).run(training.by_fsdp, job)
    assert ours[0].losses == alone[0].losses
    for name, weights in ours[0].weights.items():
        reference = alone[0].weights[name]
        excess = ((weights.float() - reference).abs() - reference.abs() * 2**-8).max().item()  # of one rounding
        assert excess <= 1e-9, (name, excess)


@pytest.mark.parametrize("no_sync", [False, True])
def test_replicated_shards(ranks, no_sync):
    job = Job(replicas=2, micro_batches=2, clip=0.5, no_sync=no_sync)
    ours = ranks.of(4).run(training.by_us, job)
    alone = ranks.of(4).run(training.by_fsdp, job)
    losses, weights = largest_difference(ours[0], alone[0])
    assert losses <= LIMIT and weights <= LIMIT
    assert ours[0].norms == pytest.approx(alone[0].norms, rel=1e-6)


def test_each_rank_holds_its_share(ranks):
    whole = training.by_us(Job()).report["roles"]
    for each in ranks.of(4).run(training.by_us, Job()):
        for role in ("compute_weights", "momentum", "variance"):
            assert each.report["roles"][role]["dram"] == whole[role]["dram"] / 4, role


ON_A_DEVICE = {
    "accumulated and clipped": Job(micro_batches=3, clip=0.5),
    "uneven shards, unused weights": Job(model="transformer", tied=False, clip=0.1),
    "reduced by the last micro-batch alone": Job(model="transformer", tied=False, micro_batches=3, no_sync=True),
    "lora, reduced by the last micro-batch alone": Job(lora=True, micro_batches=2, clip=0.05, no_sync=True),
    "float32 masters": Job(model="transformer", bf16=True, options={"master": "fp32"}),
    "split masters": Job(model="transformer", bf16=True),
    "split masters, reduced by the last micro-batch": Job(
        model="transformer", bf16=True, micro_batches=3, no_sync=True
    ),
}


@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_on_a_device_apart_as_fsdp_alone_there(ranks, name):
    job = ON_A_DEVICE[name]
    ours = ranks.of(2, "apart").run(training.by_us, job)
    alone = ranks.of(2, "apart").run(training.by_fsdp, job)
    for mine, theirs in zip(ours, alone, strict=True):
        if job.bf16:
            assert mine.losses == theirs.losses
            continue
        losses, weights = largest_difference(mine, theirs)
        assert losses <= LIMIT and weights <= LIMIT, (losses, weights)
        assert mine.norms == pytest.approx(theirs.norms, rel=1e-6)


SCALARS = {
    "reduced by the last micro-batch alone": (2, "cpu", {"micro_batches": 3, "no_sync": True, "clip": 0.1}),
    "clipped": (2, "cpu", {"clip": 0.1, "micro_batches": 2}),
    "replicas": (4, "cpu", {"replicas": 2, "micro_batches": 2, "no_sync": True}),
    "another optimizer": (2, "cpu", {"optimizer": "SGD", "clip": 0.1}),
    "frozen": (2, "cpu", {"frozen": ("logit_scale",)}),
    "on a device": (2, "apart", {"clip": 0.1, "micro_batches": 3}),
    "on a device, reduced by the last micro-batch alone": (2, "apart", {"micro_batches": 3, "no_sync": True}),
}


@pytest.mark.parametrize("name", SCALARS)
def test_parameters_without_dimensions_train_as_with_one_process(ranks, name):
    world, device, given = SCALARS[name]
    job = Job(model="transformer", scalars=True, **given)
    found, alone = ranks.of(world, device).run(training.by_us, job), training.by_one(job)
    for each in found:
        assert largest_difference(each, found[0]) == (0, 0), "all processes have the same"
        losses, weights = largest_difference(each, alone)
        assert losses <= 10 * LIMIT and weights <= 5 * LIMIT
        assert each.norms == pytest.approx(alone.norms, rel=1e-5)
