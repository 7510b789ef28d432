import pytest

from tests.distributed import training
from tests.distributed.training import LIMIT, Job, assert_near, assert_same, trained_as_by_fsdp

JOBS = {
    "plain": (2, Job()),
    "accumulated and clipped": (2, Job(micro_batches=3, clip=0.5)),
    "reduced by the last micro-batch alone": (2, Job(micro_batches=3, clip=0.5, no_sync=True)),
    "not tied": (2, Job(tied=False, clip=0.5)),
    "uneven shards, unused weights": (2, Job(model="transformer", tied=False, clip=0.1)),
    "uneven shards, unused weights, four processes": (4, Job(model="transformer", tied=False, clip=0.1)),
    "frozen weights": (2, Job(frozen=("mlp", "embed"), clip=0.5)),
    "lora": (2, Job(lora=True, micro_batches=2, clip=0.05)),
    "another optimizer": (2, Job(optimizer="SGD", micro_batches=2, clip=0.5)),
    "torch's own AdamW": (2, Job(options={"cpu_adam": False}, clip=0.5)),
    "replicas, reduced by the last micro-batch alone": (4, Job(replicas=2, micro_batches=2, clip=0.5, no_sync=True)),
}
EVERY = {
    "replicas": (4, Job(replicas=2, micro_batches=2, clip=0.5)),
    "split masters, sums in float32": (2, Job(model="transformer", bf16=True, steps=2, micro_batches=3)),
}


@pytest.mark.parametrize("name", [*JOBS, *(pytest.param(name, marks=pytest.mark.every_case) for name in EVERY)])
def test_as_fsdp_alone_and_as_one_process(ranks, name):
    world, job = {**JOBS, **EVERY}[name]
    trained_as_by_fsdp(ranks, job, world)


def test_each_rank_holds_its_share(ranks):
    whole = training.by_us(Job()).report["roles"]
    for each in ranks.of(4).run(training.by_us, Job()):
        for role in ("compute_weights", "momentum", "variance"):
            assert each.report["roles"][role]["dram"] == whole[role]["dram"] / 4, role


BF16 = {"model": "transformer", "bf16": True}
ON_A_DEVICE = {
    "accumulated and clipped": Job(micro_batches=3, clip=0.5),
    "uneven shards, unused weights": Job(model="transformer", tied=False, clip=0.1),
    "reduced by the last micro-batch alone": Job(model="transformer", tied=False, micro_batches=3, no_sync=True),
    "lora, reduced by the last micro-batch alone": Job(lora=True, micro_batches=2, clip=0.05, no_sync=True),
    "float32 masters": Job(**BF16, options={"master": "fp32"}),
    "split masters": Job(**BF16),
    "muon": Job(model="transformer", tied=False, optimizer="Muon", frozen=("norm", "bias")),
    "split masters, reduced by the last micro-batch": Job(**BF16, micro_batches=3, no_sync=True),
}


@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_on_a_device_apart_as_fsdp_alone_there(ranks, name):
    trained_as_by_fsdp(ranks, ON_A_DEVICE[name], kind="apart")


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
    assert_same(found, [found[0]] * world)
    assert_near(found[0], alone, losses=10 * LIMIT, weights=5 * LIMIT)
    assert found[0].norms == pytest.approx(alone.norms, rel=1e-5)
